// The operator table: an operator on DTensors in every placement of its inputs, on one axis of 2
// and 3 ranks and on two axes, gives the numbers of the plain operator, and its gradients.
#pragma once

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>

#include "tests/dtensor/dtensor_table.h"
#include "tests/support/log_capture.h"
#include "tests/support/run_ranks.h"

namespace longhaul::test {

using dtensor::DeviceMesh;
using dtensor::World;
using Inputs = std::vector<Tensor>;

struct Case {
  std::string name;
  std::vector<std::vector<int64_t>> sizes;  // of the fp64 inputs
  std::function<Tensor(const Inputs&)> f;
  bool differentiable = true;

  Case(std::string n, std::vector<std::vector<int64_t>> s, std::function<Tensor(const Inputs&)> g,
       bool d = true)
      : name(std::move(n)), sizes(std::move(s)), f(std::move(g)), differentiable(d) {}
};

// f on the wholes, with the gradients of sum(f * g).
struct Expected {
  Tensor y, g;
  std::vector<Tensor> grads;
};

inline Expected plain(const Case& c, const Inputs& wholes) {
  Inputs leaves;
  for (const Tensor& x : wholes) leaves.push_back(x.clone().requires_grad_(c.differentiable));
  const Tensor y = c.f(leaves);
  Expected expected{y.detach(), normal(y.sizes(), 99), {}};
  if (!c.differentiable) return expected;
  torch::autograd::backward({(y * expected.g).sum()}, {});
  for (const Tensor& x : leaves) expected.grads.push_back(x.grad());
  return expected;
}

inline void expect_near(const Tensor& got, const Tensor& want, const std::string& what) {
  ASSERT_EQ(got.sizes(), want.sizes()) << what;
  const double error = got.numel() ? (got - want).abs().max().item<double>() : 0;
  EXPECT_LE(error, 1e-9) << what;
}

// `to float` rounds terms away from their sum.
inline bool is_rounded(const Case& c) { return c.name.find("float") != std::string::npos; }

inline void check(const Case& c, const Mesh& mesh, const Inputs& wholes, const Expected& expected,
                  const std::vector<Placements>& placements) {
  std::string what = c.name + " on " + mesh->text() + ":";
  Inputs leaves;
  for (size_t i = 0; i < wholes.size(); ++i) {
    what += " " + text_of(placements[i]);
    leaves.push_back(scatter(wholes[i], mesh, placements[i]).requires_grad_(c.differentiable));
  }
  SCOPED_TRACE(what);
  const Tensor y = c.f(leaves);
  if (is_rounded(c)) {
    EXPECT_LE((whole_of(y) - expected.y).abs().max().item<double>(), 1e-6);
    return;
  }
  expect_near(whole_of(y), expected.y, "result");
  if (!c.differentiable) return;
  torch::autograd::backward({(dtensor::full_tensor(y) * expected.g).sum()}, {});
  for (size_t i = 0; i < leaves.size(); ++i) {
    ASSERT_EQ(leaves[i].grad().defined(), expected.grads[i].defined()) << "gradient " << i;
    if (leaves[i].grad().defined()) {
      expect_near(whole_of(leaves[i].grad()), expected.grads[i], "gradient " + std::to_string(i));
    }
  }
}

// All placements of all inputs, along each axis; every `stride`-th of them.
inline void for_all_placements(const Case& c, int axes, size_t stride,
                               const std::function<void(const std::vector<Placements>&)>& f) {
  std::vector<std::vector<Placement>> choices;
  for (const auto& sizes : c.sizes) {
    for (int axis = 0; axis < axes; ++axis) {
      choices.push_back(all_placements(static_cast<int64_t>(sizes.size())));
    }
  }
  std::vector<size_t> at(choices.size(), 0);
  for (size_t number = 0;; ++number) {
    std::vector<Placements> placements(c.sizes.size());
    for (size_t i = 0; i < choices.size(); ++i) {
      placements[i / static_cast<size_t>(axes)].push_back(choices[i][at[i]]);
    }
    if (number % stride == 0) f(placements);
    size_t i = 0;
    while (i < at.size() && ++at[i] == choices[i].size()) at[i++] = 0;
    if (i == at.size()) return;
  }
}

inline void check_all(const std::vector<Case>& cases, const std::vector<DeviceMesh::AxisSize>& axes,
                      size_t stride = 1) {
  const LogCapture unsaid;  // of thousands of gathers
  int ranks = 1;
  for (const auto& axis : axes) ranks *= static_cast<int>(axis.size);
  run_ranks(ranks, [&](World& world) {
    const Mesh mesh = DeviceMesh::make(world, axes);
    for (const Case& c : cases) {
      Inputs wholes;
      for (size_t i = 0; i < c.sizes.size(); ++i) wholes.push_back(normal(c.sizes[i], 10 + i));
      const Expected expected = plain(c, wholes);
      for_all_placements(c, static_cast<int>(axes.size()), stride, [&](const auto& placements) {
        check(c, mesh, wholes, expected, placements);
      });
    }
  });
}

// A table without a case would pass whatever the rules say.
inline void check_table(const std::vector<Case>& cases) {
  ASSERT_FALSE(cases.empty());
  check_all(cases, {{"tp", 2}});
  check_all(cases, {{"tp", 3}});
  check_all(cases, {{"cp", 2}, {"tp", 2}});
}

}  // namespace longhaul::test
