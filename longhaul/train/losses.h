// The objective of a micro-batch. Each loss is a sum, divided once by the global number of its
// valid labels, so gradients do not depend on how the batch is cut. Auxiliary losses (indexer,
// balance, z) are not in here: they travel with the activations. Called by the trainer and by
// validation.
#pragma once

#include <vector>

#include "longhaul/models/deepseek_v3/model.h"

namespace longhaul::train {

struct Objective {
  at::Tensor total;                  // lm + mtp_weight / depth * sum of MTP losses; a scalar
  std::vector<at::Tensor> by_tower;  // detached; [0] the language model, [k] MTP of depth k
};

// `hidden` as Model::forward returns it; `counts` over the global batch.
Objective compute_objective(const deepseek_v3::Model& model, const deepseek_v3::Batch& batch,
                            const std::vector<at::Tensor>& hidden,
                            const deepseek_v3::GlobalCounts& counts, double mtp_weight);

}  // namespace longhaul::train
