// RMSNorm (Zhang and Sennrich, 2019): y = weight * cast(x / sqrt(mean(x^2) + eps)), statistics in
// fp32 (fp64 for fp64 input), cast to the dtype of x before the weight is applied, as Hugging Face
// does. x [..., D], weight [D] of any floating dtype: [..., D] in the dtype of x.
#pragma once

#include <ATen/core/Tensor.h>

namespace longhaul::ops {

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight_D, double eps);

}  // namespace longhaul::ops
