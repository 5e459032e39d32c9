// Auxiliary losses travel with the activations: the identity on x, whose backward adds d(loss) = 1.
// A model part that ends in x needs no other wiring for its indexer, balance and z losses.
#pragma once

#include <ATen/core/Tensor.h>

namespace longhaul::nn {

// Returns x. When x is differentiated, so is `loss` (a scalar, already weighted and divided). If x
// itself needs no gradient (a frozen trunk), there is nothing to travel on and the loss is
// differentiated at once. Does nothing when `loss` needs no gradient.
at::Tensor attach_loss(const at::Tensor& x, const at::Tensor& loss);

}  // namespace longhaul::nn
