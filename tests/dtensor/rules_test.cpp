// The operator table: each operator on DTensors in every placement of its inputs, on one axis of 2
// and 3 ranks and on two axes, gives the numbers of the plain operator, and its gradients.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>

#include "tests/dtensor/dtensor_table.h"
#include "tests/support/run_ranks.h"

namespace longhaul::test {
namespace {

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

// Numbers that do not divide by 2 or 3 beside numbers that do.
std::vector<Case> pointwise_cases() {
  return {
      {"add", {{4, 5}, {4, 5}}, [](const Inputs& x) { return x[0] + x[1]; }},
      {"add broadcast", {{4, 5}, {5}}, [](const Inputs& x) { return x[0] + x[1]; }},
      {"add broadcast 1", {{4, 5}, {4, 1}}, [](const Inputs& x) { return x[0] + x[1]; }},
      {"sub alpha", {{4, 5}, {4, 5}}, [](const Inputs& x) { return at::sub(x[0], x[1], 3); }},
      {"add number", {{4, 5}}, [](const Inputs& x) { return x[0] + 2; }},
      {"mul", {{4, 5}, {4, 5}}, [](const Inputs& x) { return x[0] * x[1]; }},
      {"mul broadcast", {{4, 1, 5}, {3, 1}}, [](const Inputs& x) { return x[0] * x[1]; }},
      {"mul number", {{4, 5}}, [](const Inputs& x) { return x[0] * 2.5; }},
      {"div", {{4, 5}, {4, 5}}, [](const Inputs& x) { return x[0] / (x[1].abs() + 1); }},
      {"neg", {{7}}, [](const Inputs& x) { return -x[0]; }},
      {"silu", {{4, 5}}, [](const Inputs& x) { return at::silu(x[0]); }},
      {"sigmoid", {{4, 5}}, [](const Inputs& x) { return at::sigmoid(x[0]); }},
      {"where",
       {{4, 5}, {4, 5}},
       [](const Inputs& x) { return at::where(x[0].gt(0), x[0], x[1]); }},
      {"masked_fill", {{4, 5}}, [](const Inputs& x) { return x[0].masked_fill(x[0].gt(0), 0.5); }},
      {"clamp", {{4, 5}}, [](const Inputs& x) { return x[0].clamp(-0.5, 0.5); }},
      {"to float and back",
       {{4, 5}},
       [](const Inputs& x) { return x[0].to(at::kFloat).to(at::kDouble); }},
      {"square of exp", {{3, 2}}, [](const Inputs& x) { return x[0].exp().square(); }},
      {"in place",
       {{4, 5}, {4, 5}},
       [](const Inputs& x) {
         Tensor y = x[0] * 2;
         y.add_(x[0]);
         return y * x[1];
       }},
      {"product in place",
       {{4, 5}, {4, 5}},
       [](const Inputs& x) {
         Tensor y = x[0].clone();
         y.mul_(x[1]);
         return y + x[1];
       }},
  };
}

std::vector<Case> view_cases() {
  return {
      {"view join",
       {{4, 3, 5}},
       [](const Inputs& x) {
         return x[0].reshape({12, 5}) * 2;
       }},
      {"view split",
       {{12, 5}},
       [](const Inputs& x) {
         return x[0].view({6, 2, 5});
       }},
      {"view split uneven",
       {{10, 5}},
       [](const Inputs& x) {
         return x[0].view({5, 2, 5});
       }},
      {"view with ones",
       {{6, 5}},
       [](const Inputs& x) {
         return x[0].view({1, 6, 1, 5});
       }},
      {"view heads",
       {{2, 3, 12}},
       [](const Inputs& x) {
         return x[0].view({2, 3, 6, 2});
       }},
      {"transpose", {{4, 3, 5}}, [](const Inputs& x) { return x[0].transpose(0, 2); }},
      {"transpose, reshape",
       {{4, 3, 6}},
       [](const Inputs& x) {
         return x[0].transpose(0, 1).reshape({3, 24});
       }},
      {"permute",
       {{4, 3, 5}},
       [](const Inputs& x) {
         return x[0].permute({2, 0, 1});
       }},
      {"t", {{4, 3}}, [](const Inputs& x) { return x[0].t(); }},
      {"unsqueeze", {{4, 3}}, [](const Inputs& x) { return x[0].unsqueeze(1); }},
      {"squeeze", {{4, 1, 3}}, [](const Inputs& x) { return x[0].squeeze(1); }},
      {"expand",
       {{4, 1, 3}},
       [](const Inputs& x) {
         return x[0].expand({2, 4, 5, 3});
       }},
      {"squeeze all", {{4, 1, 3}}, [](const Inputs& x) { return x[0].squeeze(); }},
      {"squeeze what stays", {{2, 3}}, [](const Inputs& x) { return x[0].squeeze(0) * 2; }},
      {"sum of transposed, viewed",
       {{4, 6}, {4, 6}},
       [](const Inputs& x) { return (x[0].t() + x[1].t()).t().view({24}); }},
      {"slice", {{6, 5}}, [](const Inputs& x) { return x[0].slice(0, 1, 5, 2); }},
      {"narrow last", {{6, 5}}, [](const Inputs& x) { return x[0].narrow(-1, 1, 3); }},
      {"select", {{6, 5, 4}}, [](const Inputs& x) { return x[0].select(1, 2); }},
      {"split",
       {{6, 5}},
       [](const Inputs& x) {
         const auto parts = x[0].split_with_sizes({2, 3}, 1);
         return at::cat({parts[1] * 2, parts[0]}, 1);
       }},
      {"contiguous",
       {{4, 3, 5}},
       [](const Inputs& x) {
         return x[0].transpose(1, 2).contiguous().view({4, 15});
       }},
      {"detach", {{4, 3}}, [](const Inputs& x) { return x[0].detach(); }, false},
  };
}

std::vector<Case> product_cases() {
  return {
      {"mm", {{4, 6}, {6, 5}}, [](const Inputs& x) { return at::mm(x[0], x[1]); }},
      {"mm of transposed",
       {{6, 4}, {5, 6}},
       [](const Inputs& x) { return at::mm(x[0].t(), x[1].t()); }},
      {"bmm", {{3, 4, 6}, {3, 6, 5}}, [](const Inputs& x) { return at::bmm(x[0], x[1]); }},
      {"matmul 3D", {{2, 4, 6}, {6, 5}}, [](const Inputs& x) { return at::matmul(x[0], x[1]); }},
      {"outer", {{4}, {5}}, [](const Inputs& x) { return x[0].unsqueeze(1) * x[1]; }},
  };
}

std::vector<Case> reduction_cases() {
  return {
      {"sum", {{4, 5}}, [](const Inputs& x) { return x[0].sum(); }},
      {"sum dim", {{4, 5, 3}}, [](const Inputs& x) { return x[0].sum(1); }},
      {"sum keepdim",
       {{4, 5, 3}},
       [](const Inputs& x) {
         return x[0].sum(at::IntArrayRef{0, 2}, true);
       }},
      {"mean", {{4, 6}}, [](const Inputs& x) { return x[0].mean(); }},
      {"mean uneven", {{5, 7}}, [](const Inputs& x) { return x[0].mean(0); }},
      {"amax", {{4, 6}}, [](const Inputs& x) { return x[0].amax(-1); }},
      {"logsumexp", {{4, 6}}, [](const Inputs& x) { return at::logsumexp(x[0], {1}); }},
      {"softmax", {{4, 6}}, [](const Inputs& x) { return at::softmax(x[0], -1); }},
      {"log_softmax", {{4, 3, 6}}, [](const Inputs& x) { return at::log_softmax(x[0], 1); }},
      {"cumsum", {{4, 6}}, [](const Inputs& x) { return x[0].cumsum(1); }},
      {"topk", {{4, 6}}, [](const Inputs& x) { return std::get<0>(x[0].topk(2, 1)); }},
      {"topk of rows", {{5, 3}}, [](const Inputs& x) { return std::get<0>(x[0].topk(2, 0)) * 3; }},
      {"max dim", {{4, 6}}, [](const Inputs& x) { return std::get<0>(x[0].max(1)); }},
      {"min keepdim", {{4, 6}}, [](const Inputs& x) { return std::get<0>(x[0].min(0, true)); }},
      {"sort", {{4, 6}, {4, 6}}, [](const Inputs& x) { return std::get<0>(x[0].sort(1)) * x[1]; }},
      {"layer_norm",
       {{2, 4, 6}, {6}, {6}},
       [](const Inputs& x) { return at::layer_norm(x[0], {6}, x[1], x[2], 1e-6); }},
      {"tril", {{3, 4, 4}}, [](const Inputs& x) { return x[0].tril(); }},
  };
}

std::vector<Case> index_cases() {
  return {
      {"cat",
       {{4, 3}, {4, 2}},
       [](const Inputs& x) {
         return at::cat({x[0], x[1]}, 1);
       }},
      {"stack",
       {{4, 3}, {4, 3}},
       [](const Inputs& x) {
         return at::stack({x[0], x[1]}, 1);
       }},
      {"gather",
       {{4, 6}, {4, 6}},
       [](const Inputs& x) { return x[0].gather(1, x[1].abs().mul(2).clamp(0, 5).to(at::kLong)); }},
      {"index_select",
       {{6, 4}, {5}},
       [](const Inputs& x) {
         return x[0].index_select(0, x[1].abs().mul(2).clamp(0, 5).to(at::kLong));
       }},
      {"embedding",
       {{7, 4}, {2, 6}},
       [](const Inputs& x) {
         return at::embedding(x[0], x[1].abs().mul(3).clamp(0, 6).to(at::kLong));
       }},
      {"scatter_add",
       {{4, 6}, {4, 6}},
       [](const Inputs& x) {
         const Tensor index = x[1].abs().mul(2).clamp(0, 5).to(at::kLong);
         return at::zeros_like(x[0]).scatter_add(1, index, x[0]);
       }},
  };
}

// f on the wholes, with the gradients of sum(f * g).
struct Expected {
  Tensor y, g;
  std::vector<Tensor> grads;
};

Expected plain(const Case& c, const Inputs& wholes) {
  Inputs leaves;
  for (const Tensor& x : wholes) leaves.push_back(x.clone().requires_grad_(c.differentiable));
  const Tensor y = c.f(leaves);
  Expected expected{y.detach(), normal(y.sizes(), 99), {}};
  if (!c.differentiable) return expected;
  torch::autograd::backward({(y * expected.g).sum()}, {});
  for (const Tensor& x : leaves) expected.grads.push_back(x.grad());
  return expected;
}

void expect_near(const Tensor& got, const Tensor& want, const std::string& what) {
  ASSERT_EQ(got.sizes(), want.sizes()) << what;
  const double error = got.numel() ? (got - want).abs().max().item<double>() : 0;
  EXPECT_LE(error, 1e-9) << what;
}

// `to float` rounds terms away from their sum.
bool is_rounded(const Case& c) { return c.name.find("float") != std::string::npos; }

void check(const Case& c, const Mesh& mesh, const Inputs& wholes, const Expected& expected,
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

// All placements of all inputs, along each axis.
void for_all_placements(const Case& c, int axes,
                        const std::function<void(const std::vector<Placements>&)>& f) {
  std::vector<std::vector<Placement>> choices;
  for (const auto& sizes : c.sizes) {
    for (int axis = 0; axis < axes; ++axis) {
      choices.push_back(all_placements(static_cast<int64_t>(sizes.size())));
    }
  }
  std::vector<size_t> at(choices.size(), 0);
  while (true) {
    std::vector<Placements> placements(c.sizes.size());
    for (size_t i = 0; i < choices.size(); ++i) {
      placements[i / static_cast<size_t>(axes)].push_back(choices[i][at[i]]);
    }
    f(placements);
    size_t i = 0;
    while (i < at.size() && ++at[i] == choices[i].size()) at[i++] = 0;
    if (i == at.size()) return;
  }
}

void check_all(const std::vector<Case>& cases, const std::vector<DeviceMesh::AxisSize>& axes) {
  int ranks = 1;
  for (const auto& axis : axes) ranks *= static_cast<int>(axis.size);
  run_ranks(ranks, [&](World& world) {
    const Mesh mesh = DeviceMesh::make(world, axes);
    for (const Case& c : cases) {
      Inputs wholes;
      for (size_t i = 0; i < c.sizes.size(); ++i) wholes.push_back(normal(c.sizes[i], 10 + i));
      const Expected expected = plain(c, wholes);
      for_all_placements(c, static_cast<int>(axes.size()), [&](const auto& placements) {
        check(c, mesh, wholes, expected, placements);
      });
    }
  });
}

void check_table(const std::vector<Case>& cases) {
  check_all(cases, {{"tp", 2}});
  check_all(cases, {{"tp", 3}});
  check_all(cases, {{"cp", 2}, {"tp", 2}});
}

TEST(Rules, Pointwise) { check_table(pointwise_cases()); }
TEST(Rules, Views) { check_table(view_cases()); }
TEST(Rules, Products) { check_table(product_cases()); }
TEST(Rules, Reductions) { check_table(reduction_cases()); }
TEST(Rules, Index) { check_table(index_cases()); }

}  // namespace
}  // namespace longhaul::test
