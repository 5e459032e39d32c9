// SwiGLU (Shazeer, 2020): silu(gate) * up, element by element, in the dtype of the inputs.
#pragma once

#include <ATen/core/Tensor.h>

namespace longhaul::ops {

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);

}  // namespace longhaul::ops
