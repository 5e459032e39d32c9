#include "longhaul/train/guard.h"

#include <ATen/ATen.h>

namespace longhaul::train {

bool router_biases_are_finite(deepseek_v3::Model& model) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> sums;
  for (auto& [layer, router] : model.routers()) {
    if (router->bias().defined()) sums.push_back(router->bias().sum());
  }
  return sums.empty() || at::isfinite(at::stack(sums)).all().item<bool>();
}

std::string find_nonfinite(const deepseek_v3::Model& model) {
  const at::NoGradGuard no_grad;
  for (const auto& list : {model.parameters(), model.buffers()}) {
    for (const auto& state : list) {
      if (!at::isfinite(*state.tensor).all().item<bool>()) return state.name;
    }
  }
  return "";
}

}  // namespace longhaul::train
