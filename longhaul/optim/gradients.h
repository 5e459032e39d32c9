// The norm of all gradients together, and the factor that clips it.
#pragma once

#include <memory>
#include <vector>

#include "longhaul/dtensor/communicator.h"
#include "longhaul/nn/module.h"

namespace longhaul::optim {

// The p-norm (2, inf or any p > 0) over all gradients that exist, combined in fp64; 0 without any.
double gradient_norm(const std::vector<nn::NamedParameter>& parameters, double p);

// Parameters whose elements lie on the ranks of some groups, different ones on each.
struct GradientGroup {
  std::vector<nn::NamedParameter> parameters;
  std::vector<std::shared_ptr<const dtensor::Communicator>> cut_by;
};

// The same over the gradients of all groups, each element once. Collective over each group's
// `cut_by`; the same on all ranks.
double gradient_norm(const std::vector<GradientGroup>& groups, double p);

// min(1, max_norm / (norm + 1e-6)); 1 if max_norm is 0, which means no clipping.
double clip_factor(double norm, double max_norm);

}  // namespace longhaul::optim
