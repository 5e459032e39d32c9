// What the ranks of a step add up: counts before it, losses and statistics after it. Each rank has
// terms of sums that were divided by global counts already. On one rank nothing happens.
#pragma once

#include <vector>

#include "longhaul/dtensor/communicator.h"
#include "longhaul/models/deepseek_v3/context.h"

namespace longhaul::train {

// Collective over `group`.
void sum_counts(deepseek_v3::GlobalCounts& counts, const dtensor::Communicator& group);
void sum_losses(std::vector<double>& by_tower, deepseek_v3::StepStats& stats,
                const dtensor::Communicator& group);

}  // namespace longhaul::train
