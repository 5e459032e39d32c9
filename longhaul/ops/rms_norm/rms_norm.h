// RMSNorm (Zhang and Sennrich, 2019): y = weight * cast(x / sqrt(mean(x^2) + eps)), statistics in
// fp32 (fp64 for fp64 input), cast to the dtype of x before the weight is applied, as Hugging Face
// does. x [..., D], weight [D] of any floating dtype: [..., D] in the dtype of x.
// With rstd = 1 / sqrt(mean(x^2) + eps) and g = dy weight:
//   dx = rstd (g - x rstd^2 mean(g x)),   dweight = sum over the rows of dy x rstd
#pragma once

#include <ATen/core/Tensor.h>

#include "longhaul/ops/kernel.h"

namespace longhaul::ops {

// Throws Error where the weight's width is not that of x. Fused: fp32 and bf16 on the CPU, saves
// one number a row for the gradient; dweight is summed in fp32 in an order that depends on the
// number of rows only. Rows of x may lie at any distance from each other.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight_D, double eps,
                    Kernel kernel = Kernel::kReference);

// A block's output joins the residual stream, and the next norm follows:
//   sum = x + residual,  y = rms_norm(sum);   dx = dresidual = dsum + (gradient through the norm)
struct NormedSum {
  at::Tensor y, sum;
};

// x and residual of one shape and dtype, else Error. Fused: the bits of addition and rms_norm one
// after the other, forward and backward, in one pass over memory each.
NormedSum rms_norm_add(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight_D,
                       double eps, Kernel kernel = Kernel::kReference);

// Both directions without autograd, for callers that bring their own; fused where the kernels cover
// x, else by definition.
struct NormForward {
  at::Tensor y;
  at::Tensor sum;   // x + residual; undefined without a residual
  at::Tensor rstd;  // [rows], fp32 (fp64 for fp64)
};
NormForward rms_norm_forward(const at::Tensor& x, const at::Tensor& residual,
                             const at::Tensor& weight_D, double eps);

// The gradients of what was normalised, x, and of the weight, from those of the norm and, if
// defined, of x itself.
struct NormGradients {
  at::Tensor d_x, d_weight;
};
NormGradients rms_norm_grad(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight_D,
                            const at::Tensor& rstd, const at::Tensor& d_sum);

// The definitions, in plain ATen.
at::Tensor rms_norm_reference(const at::Tensor& x, const at::Tensor& weight_D, double eps);
NormForward rms_norm_forward_reference(const at::Tensor& x, const at::Tensor& residual,
                                       const at::Tensor& weight_D, double eps);
NormGradients rms_norm_grad_reference(const at::Tensor& dy, const at::Tensor& x,
                                      const at::Tensor& weight_D, const at::Tensor& rstd,
                                      const at::Tensor& d_sum);

}  // namespace longhaul::ops
