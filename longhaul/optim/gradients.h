// The norm of all gradients together, and the factor that clips it.
#pragma once

#include <vector>

#include "longhaul/nn/module.h"

namespace longhaul::optim {

// The p-norm (2, inf or any p > 0) over all gradients that exist, combined in fp64; 0 without any.
double gradient_norm(const std::vector<nn::NamedParameter>& parameters, double p);

// min(1, max_norm / (norm + 1e-6)); 1 if max_norm is 0, which means no clipping.
double clip_factor(double norm, double max_norm);

}  // namespace longhaul::optim
