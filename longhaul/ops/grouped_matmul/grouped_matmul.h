// Grouped matrix product: each expert multiplies its own run of rows.
//   y[r] = weight[e] x[r]  for the rows r of group e;  groups follow each other, rows behind the
//   last group give 0.   dx[r] = weight[e]^T dy[r],   dweight[e] = sum over its rows of dy[r]
//   x[r]^T.
// x [M, K], weight [E, N, K], counts [E] int64 (sum <= M): y [M, N]. An empty group costs nothing
// and its weight gradient is exactly 0. Errors: shapes that do not fit, counts that exceed M.
#pragma once

#include <ATen/core/Tensor.h>

namespace longhaul::ops {

at::Tensor grouped_matmul(const at::Tensor& x_MK, const at::Tensor& weight_ENK,
                          const at::Tensor& counts_E);

}  // namespace longhaul::ops
