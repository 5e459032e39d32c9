// From the job file's words to the values that the parts of a run are built from. No policy of its
// own: each function is one section's translation. Called by the trainer and the commands.
#pragma once

#include <ATen/core/Tensor.h>

#include "longhaul/base/error.h"
#include "longhaul/config/job_config.h"
#include "longhaul/converters/converters.h"
#include "longhaul/models/deepseek_v3/model.h"
#include "longhaul/optim/adam_w.h"
#include "longhaul/optim/lr_schedule.h"

namespace longhaul::train {

// debug.deterministic, for the whole process, as in TorchTitan: libtorch takes only deterministic
// algorithms, and one that has none throws (deterministic_warn_only: warns). Memory that is not
// written yet then holds NaN. Our own kernels are deterministic in any case. Call it before the
// first use of a device: cuBLAS reads its environment then.
void set_determinism(const JobConfig& config);

// What converters may ask of the job and its model.
converters::Properties converter_properties(const JobConfig& config,
                                            const deepseek_v3::ModelConfig& shape);

// Switches on the fused kernels that the job lists. Errors name the setting and its place.
void apply_converters(const JobConfig& config, deepseek_v3::Model& model);

deepseek_v3::ModelSettings model_settings(const JobConfig& config, at::Device device);
optim::AdamWConfig adam_w_config(const JobConfig& config);
optim::LrScheduleOptions lr_schedule_options(const JobConfig& config);

// Rows of a step, dealt to the ranks that read data; and the micro-batches of a rank.
struct BatchSizes {
  int64_t local = 0;
  int64_t global = 0;
  int64_t data_ranks = 1;
  int64_t micro_batches() const {
    return div_exact(global, local * data_ranks, "global batch by local batch and ranks");
  }
};
BatchSizes batch_sizes(const JobConfig& config, int64_t data_ranks);

// debug.seed, or 0 where the job leaves it open.
uint64_t seed_of(const JobConfig& config);

}  // namespace longhaul::train
