// AdamW with decoupled weight decay (Loshchilov and Hutter, 2019), PyTorch's form:
//   g = grad_scale * grad;  p -= lr wd p;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
//   p -= lr / (1 - b1^step) * m / (sqrt(v) / sqrt(1 - b2^step) + eps)
// One pass over contiguous fp32 or fp64 tensors of one shape on a CPU, plain ATen elsewhere.
#pragma once

#include <ATen/core/Tensor.h>

namespace longhaul::ops {

struct AdamWOptions {
  double lr, beta1, beta2, eps, weight_decay;
  double grad_scale = 1.0;  // the clipping factor
};

// Updates param, exp_avg and exp_avg_sq in place. `step` counts from 1.
void adam_w(at::Tensor& param, const at::Tensor& grad, at::Tensor& exp_avg, at::Tensor& exp_avg_sq,
            int64_t step, const AdamWOptions& options);

// The definition, in plain ATen.
void adam_w_reference(at::Tensor& param, const at::Tensor& grad, at::Tensor& exp_avg,
                      at::Tensor& exp_avg_sq, int64_t step, const AdamWOptions& options);

}  // namespace longhaul::ops
