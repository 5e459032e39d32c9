#include <ATen/ATen.h>

#include "longhaul/ops/common.h"
#include "longhaul/ops/swiglu/swiglu.h"

namespace longhaul::ops {

at::Tensor swiglu_reference(const at::Tensor& gate, const at::Tensor& up) {
  check_shape(up, gate.sizes(), "swiglu: up");
  return at::silu(gate) * up;
}

}  // namespace longhaul::ops
