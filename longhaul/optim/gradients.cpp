#include "longhaul/optim/gradients.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "longhaul/ops/common.h"
#include "longhaul/ops/sum_of_squares/sum_of_squares.h"

namespace longhaul::optim {

namespace {

std::vector<at::Tensor> gradients_of(const std::vector<nn::NamedParameter>& parameters) {
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : parameters) {
    const at::Tensor& grad = parameter.tensor->grad();
    // A shard may be empty.
    if (grad.defined() && grad.numel() > 0) gradients.push_back(grad);
  }
  return gradients;
}

}  // namespace

double gradient_norm(const std::vector<nn::NamedParameter>& parameters, double p) {
  const at::NoGradGuard no_grad;
  const auto gradients = gradients_of(parameters);
  if (p == 2) return std::sqrt(ops::sum_of_squares(gradients));
  std::vector<at::Tensor> norms;
  for (const auto& grad : gradients) {
    norms.push_back(at::linalg_vector_norm(grad, p, {}, /*keepdim=*/false, ops::wide_type(grad))
                        .to(at::kDouble));
  }
  return norms.empty() ? 0.0 : at::linalg_vector_norm(at::stack(norms), p).item<double>();
}

double gradient_norm(const std::vector<GradientGroup>& groups, double p) {
  const bool largest = std::isinf(p);
  double total = 0;
  for (const auto& group : groups) {
    const double norm = gradient_norm(group.parameters, p);
    if (group.cut_by.empty() && groups.size() == 1) return norm;
    // A maximum over ranks may pass NaN over.
    const double term = !largest           ? std::pow(norm, p)
                        : std::isnan(norm) ? std::numeric_limits<double>::infinity()
                                           : norm;
    at::Tensor sum = at::full({1}, term, at::kDouble);
    for (const auto& ranks : group.cut_by) {
      ranks->all_reduce(sum, largest ? dtensor::Reduction::kMax : dtensor::Reduction::kSum).wait();
    }
    total = largest ? std::max(total, sum.item<double>()) : total + sum.item<double>();
  }
  return largest ? total : std::pow(total, 1 / p);
}

double clip_factor(double norm, double max_norm) {
  return max_norm > 0 ? std::min(1.0, max_norm / (norm + 1e-6)) : 1.0;
}

}  // namespace longhaul::optim
