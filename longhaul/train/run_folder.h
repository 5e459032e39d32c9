// The folder that a run writes to, before it writes: there, writable, and this run's alone. Called
// first of all, so that a mistake costs no minutes of tokenising.
#pragma once

#include "longhaul/base/file.h"
#include "longhaul/config/job_config.h"

namespace longhaul::train {

// The documents that the run's data were left without, a line each.
inline constexpr const char* kBadDocuments = "bad_documents.txt";

// Creates job.dump_folder where it is missing. The folder is claimed as long as the result lives;
// where the file system knows no locks, it is not. UserError if it cannot be written to, or if
// another process has claimed it.
FileDescriptor claim_run_folder(const JobConfig& config);

// The same for the folder of the checkpoints where it is not below the run's; else nothing is
// claimed.
FileDescriptor claim_checkpoint_folder(const JobConfig& config);

}  // namespace longhaul::train
