#include "longhaul/train/guard.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "longhaul/dtensor/exchange.h"

namespace longhaul::train {

bool router_biases_are_finite(deepseek_v3::Model& model) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> sums;
  for (auto& [layer, router] : model.routers()) {
    if (router->bias().defined()) sums.push_back(router->bias().sum());
  }
  return sums.empty() || at::isfinite(at::stack(sums)).all().item<bool>();
}

std::string find_nonfinite(const deepseek_v3::Model& model, const dtensor::Communicator& all) {
  const at::NoGradGuard no_grad;
  auto states = model.parameters();
  for (auto& buffer : model.buffers()) states.push_back(buffer);
  const auto found = std::find_if(states.begin(), states.end(), [](const auto& state) {
    return !at::isfinite(*state.tensor).all().template item<bool>();
  });
  const int64_t first = found - states.begin();
  const auto index =
      static_cast<size_t>(dtensor::reduce_number(all, first, dtensor::Reduction::kMin));
  return index == states.size() ? "" : states[index].name;
}

}  // namespace longhaul::train
