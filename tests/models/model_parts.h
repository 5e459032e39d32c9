// A model built and run part by part, as the stages of a pipeline are: each part backward from the
// gradient that the part after it returned.
#pragma once

#include <torch/csrc/autograd/autograd.h>

#include <memory>
#include <vector>

#include "tests/models/tiny_model.h"

namespace longhaul::testing {

inline v3::ModelConfig three_layers() {
  auto config = tiny_config();
  config.num_hidden_layers = 3;
  return config;
}

// The parts that end before the layers `cuts`, and the last one.
inline std::vector<v3::ModelPart> parts_at(const std::vector<int64_t>& cuts) {
  std::vector<v3::ModelPart> parts;
  int64_t first = 0;
  for (const int64_t cut : cuts) {
    parts.push_back({first, cut, first == 0 && parts.empty(), false});
    first = cut;
  }
  parts.push_back({.first_layer = first, .embedding = parts.empty()});
  return parts;
}

using Parts = std::vector<std::unique_ptr<v3::Model>>;

inline Parts build(const std::vector<v3::ModelPart>& parts, const v3::ModelSettings& settings) {
  Parts models;
  for (const auto& part : parts) {
    models.push_back(std::make_unique<v3::Model>(three_layers(), settings, part));
    randomize(*models.back(), 5);
  }
  return models;
}

// All parts forwards, then all backwards.
inline Losses forward_backward(const Parts& parts, const v3::Batch& batch,
                               v3::ForwardContext& ctx) {
  struct Boundary {
    at::Tensor sent, received;  // the hidden states that a part hands on, and the next one's own
  };
  std::vector<Boundary> boundaries;
  at::Tensor hidden;
  for (size_t i = 0; i + 1 < parts.size(); ++i) {
    const auto sent = parts[i]->forward(batch, ctx, hidden).at(0);
    hidden = sent.detach().requires_grad_();
    boundaries.push_back({sent, hidden});
  }
  auto losses = forward_losses(*parts.back(), batch, ctx, 0.3, hidden);
  backward(losses.total);
  for (auto b = boundaries.rbegin(); b != boundaries.rend(); ++b) {
    if (b->sent.requires_grad()) torch::autograd::backward({b->sent}, {b->received.grad()});
  }
  return losses;
}

// What several parts hold of it counts together.
inline void add_gradient(Tensors& gradients, const std::string& name, const at::Tensor& gradient) {
  auto& sum = gradients[name];
  sum = sum.defined() ? sum + gradient : gradient;
}

}  // namespace longhaul::testing
