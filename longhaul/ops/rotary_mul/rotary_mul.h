// Rotary position embedding (Su et al., 2021) over the last dimension R of x.
//   interleaved: pairs (x0, x1), (x2, x3), ...       (DeepSeek's MLA)
//   half_split:  pairs (x_i, x_{i + R/2})            (DeepSeek-V3.2's indexer)
// Each pair turns by its angle: (a cos - b sin, b cos + a sin).
// x [B, S, ..., R]; cos, sin [B, S, R/2] in fp32 or fp64. Computed in fp32 (fp64 for fp64 x),
// result in the dtype of x. Angles of packed documents come from their own positions.
#pragma once

#include <ATen/core/Tensor.h>

namespace longhaul::ops {

enum class RotaryMode { kInterleaved, kHalfSplit };

at::Tensor rotary_mul(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                      RotaryMode mode);

}  // namespace longhaul::ops
