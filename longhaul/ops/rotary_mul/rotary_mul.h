// Rotary position embedding (Su et al., 2021) over the last dimension R of x.
//   interleaved: pairs (x0, x1), (x2, x3), ...       (DeepSeek's MLA)
//   half_split:  pairs (x_i, x_{i + R/2})            (DeepSeek-V3.2's indexer)
// Each pair turns by its angle: (a cos - b sin, b cos + a sin); its gradient turns by the negative
// angle.
// x [B, S, ..., R]; cos, sin [B, S, R/2] in fp32 or fp64. Computed in fp32 (fp64 for fp64 x),
// result in the dtype of x. Angles of packed documents come from their own positions.
#pragma once

#include <ATen/core/Tensor.h>

#include "longhaul/ops/kernel.h"

namespace longhaul::ops {

enum class RotaryMode { kInterleaved, kHalfSplit };

// Throws Error for an odd R and for angles of other sizes. Fused: fp32 and bf16 on the CPU, without
// a gradient for cos and sin; a slice of wider rows is read where it lies.
at::Tensor rotary_mul(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                      RotaryMode mode, Kernel kernel = Kernel::kReference);

// The definition, in plain ATen.
at::Tensor rotary_mul_reference(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                                RotaryMode mode);

}  // namespace longhaul::ops
