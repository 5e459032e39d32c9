// What the ranks of a step add up: counts before it, losses and statistics after it. Each rank has
// terms of sums that were divided by global counts already. On one rank nothing happens.
//
// Where tensor parallelism cuts the sequence, statistics are terms over its ranks, too: plain
// tensors (of a layer of experts), or DTensors (of attention).
#pragma once

#include <vector>

#include "longhaul/models/deepseek_v3/context.h"
#include "longhaul/parallel/parallel_dims.h"

namespace longhaul::train {

// Collective over `group`.
void sum_counts(deepseek_v3::GlobalCounts& counts, const dtensor::Communicator& group);
// Collective over all ranks. `by_tower` is the same on all ranks of the tp axis.
void sum_losses(std::vector<double>& by_tower, deepseek_v3::StepStats& stats,
                const parallel::ParallelDims& dims);

}  // namespace longhaul::train
