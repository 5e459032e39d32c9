// Grouped matrix product: each expert multiplies its own run of rows.
//   y[r] = weight[e] x[r]  for the rows r of group e;  groups follow each other, rows behind the
//   last group give 0.   dx[r] = weight[e]^T dy[r],   dweight[e] = sum over its rows of dy[r]
//   x[r]^T.
// x [M, K], weight [E, N, K], counts [E] int64 (sum <= M): y [M, N]. An empty group costs nothing
// and its weight gradient is exactly 0. Errors: shapes that do not fit, counts that exceed M.
#pragma once

#include <ATen/core/Tensor.h>

#include "longhaul/ops/kernel.h"

namespace longhaul::ops {

// Fused: fp32 and bf16 on the CPU; each group's matrix is packed once for up to 1,024 of its rows,
// and nothing is made anew for a new number of rows. Packed matrices are not kept: a step uses each
// packed form once, unless it has several micro-batches or recomputes, and packing included the
// bf16 product takes little longer than one of the same FLOPs by oneDNN. What keeping them could
// gain and would cost: docs/benchmarks.md.
at::Tensor grouped_matmul(const at::Tensor& x_MK, const at::Tensor& weight_ENK,
                          const at::Tensor& counts_E, Kernel kernel = Kernel::kReference);

// The gradients without autograd, for callers that bring their own; those that are not wanted stay
// undefined. Fused where the kernels cover the operands, else by definition.
struct GroupedMatmulGradients {
  at::Tensor d_x, d_weight;
};
struct WantedGradients {
  bool d_x = true, d_weight = true;
};
GroupedMatmulGradients grouped_matmul_grad(const at::Tensor& dy_MN, const at::Tensor& x_MK,
                                           const at::Tensor& weight_ENK, const at::Tensor& counts_E,
                                           WantedGradients wanted);

// The definition: a product for each group.
GroupedMatmulGradients grouped_matmul_grad_reference(const at::Tensor& dy_MN,
                                                     const at::Tensor& x_MK,
                                                     const at::Tensor& weight_ENK,
                                                     const at::Tensor& counts_E,
                                                     WantedGradients wanted);
at::Tensor grouped_matmul_reference(const at::Tensor& x_MK, const at::Tensor& weight_ENK,
                                    const at::Tensor& counts_E);

}  // namespace longhaul::ops
