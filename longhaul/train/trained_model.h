// The model a run has arrived at, for the commands that look at it: evaluation and generation.
#pragma once

#include <memory>
#include <string>

#include "longhaul/config/job_config.h"
#include "longhaul/models/deepseek_v3/model.h"

namespace longhaul::train {

struct TrainedModel {
  std::unique_ptr<deepseek_v3::Model> model;
  std::string source;  // where the weights come from
};

// The job's model with the weights of `checkpoint`: one of our step folders, a folder that holds
// them, or a Hugging Face folder, FP8 or not; an empty path means the job's checkpoint folder. Of a
// folder of steps the newest sound one is taken, and each one passed over is logged with the
// reason. UserError if there is none, or if the step folder that was named is damaged.
TrainedModel load_trained_model(const JobConfig& config, const std::string& checkpoint);

// The same model as it was before its first step.
TrainedModel untrained_model(const JobConfig& config);

}  // namespace longhaul::train
