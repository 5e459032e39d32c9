// AdamW with decoupled weight decay (Loshchilov and Hutter, 2019), PyTorch's form:
//   g = grad_scale * grad;  p -= lr wd p;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
//   p -= lr / (1 - b1^step) * m / (sqrt(v) / sqrt(1 - b2^step) + eps)
// On a CPU all contiguous parameters in fp32 or bf16, whose gradients and moments have their dtype,
// are updated in one pass, every operation in fp32 and rounded by itself: the same bits on any
// number of threads and with any instruction set. In bf16 the moments and the parameter are rounded
// once, where the definition rounds each operation to bf16. Others, and other devices, take plain
// ATen, one after the other.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace longhaul::ops {

struct AdamWOptions {
  double lr, beta1, beta2, eps, weight_decay;
  double grad_scale = 1.0;  // the clipping factor
};

// One parameter with its gradient and moments, all of one shape.
struct AdamWUpdate {
  at::Tensor param, grad, exp_avg, exp_avg_sq;
  int64_t step;        // counts from 1
  bool decays = true;  // else its weight decay is 0
};

// Updates param, exp_avg and exp_avg_sq of each in place. Throws Error for shapes that differ, a
// step below 1, betas outside [0, 1) and other options below 0, before anything is changed.
void adam_w(const std::vector<AdamWUpdate>& updates, const AdamWOptions& options);

// The definition, in plain ATen.
void adam_w_reference(const AdamWUpdate& update, const AdamWOptions& options);

}  // namespace longhaul::ops
