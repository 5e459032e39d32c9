// The algebra of the parallel degrees for a number of ranks, by TorchTitan's rules. It only counts:
// it knows no mesh and no model. Called by `longhaul config check --ranks N` and by parallel/.
#pragma once

#include <cstdint>
#include <string>

#include "longhaul/config/job_config.h"

namespace longhaul {

// ranks = replicate x shard x cp x tp x pp; of one replica and stage, for the routed experts,
// shard x cp x tp = efsdp x ep x etp.
struct Degrees {
  int64_t ranks = 1, replicate = 1, shard = 1, cp = 1, tp = 1, pp = 1;
  int64_t efsdp = 1, ep = 1, etp = 1;

  // "8 ranks = dp_replicate 1 x dp_shard 2 x cp 1 x tp 4 x pp 1".
  std::string text() const;
};

// The job's degrees for `ranks` ranks, with dp_shard = -1 resolved. Throws UserError, beginning
// with text(), when the degrees do not multiply to `ranks`, the experts do not fit or the global
// batch cannot be dealt evenly.
Degrees resolve_degrees(const JobConfig& config, int64_t ranks);

// The text of resolve_degrees(), and the experts' part when expert_parallel_degree > 1.
std::string check_degrees(const JobConfig& config, int64_t ranks);

}  // namespace longhaul
