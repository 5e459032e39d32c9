// What this version cannot do yet. A job file of TorchTitan's loads unchanged; a setting that would
// change the run in a way that is not there is refused by name, one without effect passes. When a
// feature arrives, its line in capability.cpp goes. Called by training before it allocates and by
// `longhaul config check`.
#pragma once

#include <string>
#include <vector>

#include "longhaul/config/job_config.h"

namespace longhaul {

struct Remark {
  std::string key;
  std::string value;  // as TOML text
  Origin origin;
  std::string text;  // why, and what to set instead

  std::string line() const;  // "job.toml:12: compile.enable = true: ..."
};

// Settings that ask for behaviour this version does not have and that would take effect on that
// many ranks. Training refuses a job for which this is not empty.
std::vector<Remark> missing_behaviour(const JobConfig& config, int64_t ranks = 1);

// Settings that pass but are worth one line at start-up, because the run differs from what a reader
// of the file may expect; results do not.
std::vector<Remark> notes(const JobConfig& config);

// Throws UserError with the first of missing_behaviour and the number of the others.
void refuse_missing_behaviour(const JobConfig& config, int64_t ranks = 1);

}  // namespace longhaul
