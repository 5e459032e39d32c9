#include "longhaul/train/guard.h"

#include <ATen/ATen.h>

#include <algorithm>

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
  at::Tensor first = at::full({1}, static_cast<int64_t>(found - states.begin()), at::kLong);
  all.all_reduce(first, dtensor::Reduction::kMin).wait();
  const auto index = static_cast<size_t>(first.item<int64_t>());
  return index == states.size() ? "" : states[index].name;
}

}  // namespace longhaul::train
