// Which model a job trains: its shape, and where the shape came from. Reads at most one
// config.json; builds nothing. Called by the trainer, by `longhaul config` and by the commands that
// load models.
#pragma once

#include <string>

#include "longhaul/config/job_config.h"
#include "longhaul/models/deepseek_v3/model_config.h"

namespace longhaul {

struct ResolvedModel {
  deepseek_v3::ModelConfig shape;
  std::string source;  // "flavor deepseek_v32/50M (job.toml:4)" | "<folder>/config.json" | ...
};

// The shape of a flavor that the job names (a config.json in hf_assets_path that differs is warned
// of); else of hf_assets_path/config.json; else of the default flavor. mtp.num_modules and
// model.init_std, where given, replace the shape's num_nextn_predict_layers and initializer_range.
// Throws UserError on a model that cannot be trained, an unknown flavor, a config.json that is
// broken, or one whose architecture is not model.name's.
ResolvedModel resolve_model(const JobConfig& config);

}  // namespace longhaul
