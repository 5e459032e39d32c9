// Gradients by central differences in fp64, and fp32 and bf16 against fp64.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "tests/support/tensors.h"

namespace longhaul::testing {

using Inputs = std::vector<at::Tensor>;
using Function = std::function<at::Tensor(const Inputs&)>;

// The function's value weighed by fixed random numbers: a scalar whose gradient sees every output.
inline at::Tensor weighed(const at::Tensor& out) {
  return (out * normal(out.sizes(), 4711).to(out.scalar_type())).sum();
}

struct Evaluated {
  at::Tensor value;
  Inputs gradients;
};

// Value and gradients of weighed(f) at leaves that hold `inputs`.
inline Evaluated evaluate(const Function& f, const Inputs& inputs) {
  Inputs leaves;
  for (const auto& x : inputs) leaves.push_back(x.detach().clone().set_requires_grad(true));
  const at::Tensor out = f(leaves);
  return {out.detach(), torch::autograd::grad({weighed(out)}, leaves, {}, false, false, true)};
}

// (f(x + h e_i) - f(x - h e_i)) / 2h for element i of input `which`.
inline double central_difference(const Function& f, const Inputs& inputs, size_t which, int64_t i,
                                 double h) {
  const at::NoGradGuard no_grad;
  const auto at_offset = [&](double offset) {
    Inputs moved = inputs;
    moved[which] = inputs[which].detach().clone(at::MemoryFormat::Contiguous);
    moved[which].view(-1)[i] += offset;
    return weighed(f(moved)).item<double>();
  };
  return (at_offset(h) - at_offset(-h)) / (2 * h);
}

// The largest difference between the gradients and central differences of up to `samples` elements
// of each input, as a share of that input's largest gradient. f must be smooth within h. The
// truncation error is of order h^2 and rounding of order 1e-16 / h: about 1e-9 here.
inline double gradient_error(const Function& f, const Inputs& inputs, int64_t samples = 40,
                             double h = 1e-5) {
  const auto analytic = evaluate(f, inputs).gradients;
  double worst = 0;
  for (size_t which = 0; which < inputs.size(); ++which) {
    if (!analytic[which].defined()) return INFINITY;
    const at::Tensor flat = analytic[which].reshape(-1);
    const int64_t n = flat.numel(), stride = std::max<int64_t>(1, n / samples);
    double scale = flat.abs().max().item<double>(), difference = 0;
    for (int64_t i = 0; i < n; i += stride) {
      const double numeric = central_difference(f, inputs, which, i, h);
      scale = std::max(scale, std::abs(numeric));
      difference = std::max(difference, std::abs(numeric - flat[i].item<double>()));
    }
    worst = std::max(worst, difference / std::max(scale, 1e-12));
  }
  return worst;
}

inline double frobenius_error(const at::Tensor& actual, const at::Tensor& expected) {
  const at::Tensor e = expected.to(at::kDouble);
  return ((actual.to(at::kDouble) - e).norm() / e.norm().clamp_min(1e-30)).item<double>();
}

// The largest relative Frobenius error of f's value and gradients in `dtype` against fp64 on the
// same (rounded) inputs.
inline double precision_error(const Function& f, const Inputs& inputs, at::ScalarType dtype) {
  Inputs rounded, wide;
  for (const auto& x : inputs) {
    rounded.push_back(x.to(dtype));
    wide.push_back(rounded.back().to(at::kDouble));
  }
  const auto actual = evaluate(f, rounded), expected = evaluate(f, wide);
  double worst = frobenius_error(actual.value, expected.value);
  for (size_t i = 0; i < inputs.size(); ++i) {
    worst = std::max(worst, frobenius_error(actual.gradients[i], expected.gradients[i]));
  }
  return worst;
}

}  // namespace longhaul::testing
