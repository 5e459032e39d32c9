// SwiGLU (Shazeer, 2020): silu(gate) * up, element by element, in the dtype of the inputs.
// With s = sigmoid(gate):  d_up = dy gate s,   d_gate = dy up s (1 + gate (1 - s))
#pragma once

#include <ATen/core/Tensor.h>

#include "longhaul/ops/kernel.h"

namespace longhaul::ops {

// gate and up of the same sizes, else Error. Fused: fp32 and bf16 on the CPU, one rounding of each
// result.
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up, Kernel kernel = Kernel::kReference);

// The kernels without autograd. All operands are [rows, D], the elements of a row next to each
// other, rows at any distance: gate and up may be halves of wider rows, and so may their gradients,
// which are written and lie at one distance.
at::Tensor swiglu_rows(const at::Tensor& gate_RD, const at::Tensor& up_RD);
void swiglu_rows_grad(const at::Tensor& dy_RD, const at::Tensor& gate_RD, const at::Tensor& up_RD,
                      const at::Tensor& d_gate_RD, const at::Tensor& d_up_RD);

// The definition, in plain ATen.
at::Tensor swiglu_reference(const at::Tensor& gate, const at::Tensor& up);

}  // namespace longhaul::ops
