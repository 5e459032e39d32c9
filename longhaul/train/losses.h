// The objective of a micro-batch. Each loss is a sum, divided once by the global number of its
// valid labels, so gradients do not depend on how the batch is cut. Auxiliary losses (indexer,
// balance, z) are not in here: they travel with the activations. Called by the trainer and by
// validation.
#pragma once

#include <vector>

#include "longhaul/models/deepseek_v3/model.h"

namespace longhaul::train {

struct Objective {
  at::Tensor total;                  // the towers' losses by tower_weight(); a scalar
  std::vector<at::Tensor> by_tower;  // detached; [0] the language model, [k] MTP of depth k
};

// The weight of a tower's mean loss in the objective: 1 for the language model (tower 0),
// mtp_weight / depth for each of the `depth` MTP modules.
double tower_weight(size_t tower, size_t depth, double mtp_weight);

// `hidden` as Model::forward returns it; `counts` over the global batch.
Objective compute_objective(const deepseek_v3::Model& model, const deepseek_v3::Batch& batch,
                            const std::vector<at::Tensor>& hidden,
                            const deepseek_v3::GlobalCounts& counts, double mtp_weight);

}  // namespace longhaul::train
