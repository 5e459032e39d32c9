#include "longhaul/optim/gradients.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

namespace longhaul::optim {

double gradient_norm(const std::vector<nn::NamedParameter>& parameters, double p) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> norms;
  for (const auto& parameter : parameters) {
    const at::Tensor& grad = parameter.tensor->grad();
    if (!grad.defined()) continue;
    const auto wide = grad.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    norms.push_back(at::linalg_vector_norm(grad, p, {}, /*keepdim=*/false, wide).to(at::kDouble));
  }
  return norms.empty() ? 0.0 : at::linalg_vector_norm(at::stack(norms), p).item<double>();
}

double clip_factor(double norm, double max_norm) {
  return max_norm > 0 ? std::min(1.0, max_norm / (norm + 1e-6)) : 1.0;
}

}  // namespace longhaul::optim
