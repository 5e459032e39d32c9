// Cross-entropy together with the output projection.
//   loss = sum over valid t of  logsumexp(W h[t]) - (W h[t])[label[t]],   label -100 is ignored
// in fp32 (fp64 for fp64). A sum: the caller divides once by the global number of valid labels.
// hidden [T, D] and weight [V, D] of one dtype, labels [T] int64: a scalar.
#pragma once

#include <ATen/core/Tensor.h>

namespace longhaul::ops {

inline constexpr int64_t kIgnoredLabel = -100;

at::Tensor linear_cross_entropy(const at::Tensor& hidden_TD, const at::Tensor& weight_VD,
                                const at::Tensor& labels_T);

}  // namespace longhaul::ops
