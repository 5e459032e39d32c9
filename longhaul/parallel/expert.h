// Expert parallelism: the ranks of the "ep" axis hold E / ep consecutive experts of each layer and
// send each other the rows of their tokens. The model's routed part is the same as ever; only the
// rows that it has sorted by expert are computed elsewhere. The experts' weights become DTensors
// that are cut along dim 0, so that whatever cuts, gathers, counts or saves parameters knows where
// the parts belong; their gradients hold the tokens of all ranks of the axis. Called by the
// trainer, before anything else touches the parameters.
#pragma once

#include "longhaul/models/deepseek_v3/model.h"
#include "longhaul/parallel/parallel_dims.h"

namespace longhaul::parallel {

// Throws UserError, naming both numbers, unless the experts can be dealt evenly to `ranks` ranks.
void check_expert_parallel(const deepseek_v3::ModelConfig& config, int64_t ranks);

// Makes the experts' parameters parts of E / ep experts, of the group's rank r from expert r * E /
// ep on, and lets the layers exchange rows. Parameters on the Meta device get no memory; a pass
// there takes the rows to be spread evenly over the ranks. Nothing changes for a group of one.
// UserError as above.
void apply_expert_parallel(deepseek_v3::Model& model, const Group& group);

}  // namespace longhaul::parallel
