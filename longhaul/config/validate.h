// What single options cannot say: names that stand for others and settings that contradict each
// other. Called by load.h only, after the job file and the command line have been read.
#pragma once

#include "longhaul/config/job_config.h"

namespace longhaul {

// Replaces old and second names by what they mean: tokenizer_path becomes hf_assets_path, the
// dataset "text" becomes "files".
void settle(JobConfig& config);

// Throws UserError on an unknown converter and on settings that exclude each other.
void validate(const JobConfig& config);

}  // namespace longhaul
