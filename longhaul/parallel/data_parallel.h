// Which parts of a DeepSeek model are gathered together, and over which ranks their parameters are
// cut: the plan of data parallelism. Called by the trainer, after everything that replaces modules
// or cuts them otherwise.
#pragma once

#include <memory>

#include "longhaul/config/job_config.h"
#include "longhaul/models/deepseek_v3/model.h"
#include "longhaul/parallel/fsdp.h"

namespace longhaul::parallel {

// A unit for the embedding, each block and each MTP module, and one for all the rest (the last
// norms and the output head). Parameters are cut over all ranks of a copy that would hold the same:
// routed experts over efsdp, what tensor parallelism cuts over fsdp, everything else (norms, latent
// projections, indexers, routers) over tokens, whose ranks each have a term of the gradient: of a
// DTensor as its placement says (parameter_group.h), of a plain tensor because a no_parallel()
// module computes on this rank's tokens (tensor.h).
// With parallelism.fsdp_reshard_after_forward "never" everything stays gathered between its forward
// and backward passes; by "default" only the rest does, which is needed again at once, and the
// embedding where MTP modules come back to it; with "always" nothing does. On a single rank the
// model is left as it is. The result must end before the model does.
std::unique_ptr<Fsdp> apply_data_parallel(deepseek_v3::Model& model, const ParallelDims& dims,
                                          const JobConfig& config);

}  // namespace longhaul::parallel
