// What tensor parallelism cuts in DeepSeek-V3 and V3.2: heads, the columns and rows of the MLPs,
// the vocabulary; and between them the sequence. Latent projections, norms, the indexer and the
// router keep whole weights and work on slices of the sequence. Routed experts are not cut ("TP
// extend EP"): each rank routes its own slice of the tokens, without communication over tp but for
// the counts of a balance loss; the all-gather and reduce-scatter of tp stand on the shared
// experts' branch alone.
#pragma once

#include <memory>

#include "longhaul/models/deepseek_v3/model.h"
#include "longhaul/parallel/tensor.h"

namespace longhaul::parallel {

// Of the parts that this model, or part of one, has.
TensorPlan deepseek_v3_plan(deepseek_v3::Model& model);

// Throws UserError, naming both numbers, unless heads can be dealt out evenly to `ranks` ranks.
void check_tensor_parallel(const deepseek_v3::ModelConfig& config, int64_t ranks);

// Applies the plan on `mesh`, of the one axis tp, and lets balance losses add up their counts over
// it. UserError as above. nullptr for a mesh of one rank.
std::unique_ptr<TensorParallel> apply_tensor_parallel(deepseek_v3::Model& model,
                                                      const dtensor::Mesh& mesh);

// The batch as a model under that plan takes it: what its activations meet in plain operators.
deepseek_v3::Batch on_tensor_mesh(const deepseek_v3::Batch& batch, const dtensor::Mesh& mesh);

}  // namespace longhaul::parallel
