#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "longhaul/ops/common.h"
#include "longhaul/ops/sum_of_squares/sum_of_squares.h"

namespace longhaul::ops {

double sum_of_squares_reference(const std::vector<Tensor>& tensors) {
  const at::NoGradGuard no_grad;
  std::vector<Tensor> norms;  // stay on the device, which is waited for once
  for (const auto& x : tensors) {
    norms.push_back(
        at::linalg_vector_norm(x, 2, {}, /*keepdim=*/false, wide_type(x)).to(at::kDouble));
  }
  return norms.empty() ? 0.0 : at::stack(norms).square().sum().item<double>();
}

}  // namespace longhaul::ops
