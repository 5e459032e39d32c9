// The sum of the squares of all elements of many tensors, in fp64: the square of their 2-norm. fp32
// and bf16 on a CPU in one pass over all of them, in an order that depends on their sizes only;
// others are ATen's norms.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace longhaul::ops {

double sum_of_squares(const std::vector<at::Tensor>& tensors);

// The definition, in plain ATen.
double sum_of_squares_reference(const std::vector<at::Tensor>& tensors);

}  // namespace longhaul::ops
