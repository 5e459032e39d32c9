// The algebra of the parallel degrees for a number of ranks, by TorchTitan's rules. It only counts:
// it knows no mesh and no model. Called by `longhaul config check --ranks N`.
#pragma once

#include <cstdint>
#include <string>

#include "longhaul/config/job_config.h"

namespace longhaul {

// "8 ranks = dp_replicate 1 x dp_shard 2 x cp 1 x tp 4 x pp 1", with dp_shard = -1 resolved, and
// the experts' part when expert_parallel_degree > 1. Throws UserError, beginning with that line,
// when the degrees do not multiply to `ranks`, the experts do not fit or the global batch cannot be
// dealt evenly.
std::string check_degrees(const JobConfig& config, int64_t ranks);

}  // namespace longhaul
