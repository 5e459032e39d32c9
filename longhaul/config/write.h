// A JobConfig and the option table as text: the resolved job for run folders and people, the list
// of keys for the terminal and for docs/config.md. Writes no files. Called by training
// (job.print_config, job.save_config_file) and by `longhaul config`.
#pragma once

#include <string>

#include "longhaul/config/job_config.h"

namespace longhaul {

// The whole job as TOML. Loading it gives the same values; optionals that are not set are left out.
std::string to_toml(const JobConfig& config);

// What must be the same on all ranks of a job, "key = value" a line: all but the keys that name a
// file or folder, which a machine may have elsewhere.
std::string settings_of_all_ranks(const JobConfig& config);

// One line a key, "key = value  # origin", in aligned columns; of `changed` only those not default.
std::string show_values(const JobConfig& config, bool changed);

// All keys whose name begins with `prefix`: type, default, range, help.
std::string keys_text(const std::string& prefix);

// docs/config.md.
std::string keys_markdown();

}  // namespace longhaul
