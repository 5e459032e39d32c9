#include "longhaul/nn/layers.h"

#include <ATen/core/grad_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>

#include "tests/support/gradcheck.h"

namespace longhaul::testing {
namespace {

const nn::TensorSpec kFp64{.dtype = at::kDouble};

void fill(nn::Module& module, uint64_t seed) {
  const at::NoGradGuard no_grad;
  for (const auto& p : module.parameters()) {
    p.tensor->copy_(normal(p.tensor->sizes(), seed++, 0.5));
  }
}

TEST(LayerNorm, EqualsTheFormula) {
  nn::LayerNorm norm(5, 0.01, kFp64);
  fill(norm, 3);
  const auto x = normal({2, 3, 5}, 1, 2.0);
  const auto y = norm.forward(x);
  for (int64_t row = 0; row < 6; ++row) {
    const auto in = x.view({6, 5})[row];
    double mean = 0, variance = 0;
    for (int64_t i = 0; i < 5; ++i) mean += in[i].item<double>() / 5;
    for (int64_t i = 0; i < 5; ++i) variance += std::pow(in[i].item<double>() - mean, 2) / 5;
    for (int64_t i = 0; i < 5; ++i) {
      const double expected = (in[i].item<double>() - mean) / std::sqrt(variance + 0.01) *
                                  norm.weight[i].item<double>() +
                              norm.bias[i].item<double>();
      EXPECT_NEAR(y.view({6, 5})[row][i].item<double>(), expected, 1e-13);
    }
  }
}

TEST(LayerNorm, GradientOfInput) {
  nn::LayerNorm norm(5, 1e-6, kFp64);
  fill(norm, 3);
  const Function f = [&](const Inputs& x) { return norm.forward(x[0]); };
  EXPECT_LT(gradient_error(f, {normal({4, 5}, 1)}), 1e-7);
}

// Parameters stay fp32, the work is in the input's dtype, and gradients come back in fp32.
TEST(Layers, ComputeInTheInputsDtypeWithGradientsInTheParameters) {
  nn::Linear linear(8, 4, {});
  nn::RMSNorm rms(8, 1e-6, {});
  nn::LayerNorm layer(8, 1e-6, {});
  const auto x = normal({3, 8}, 1, 1, at::kBFloat16);
  for (nn::Module* module : {static_cast<nn::Module*>(&linear), static_cast<nn::Module*>(&rms),
                             static_cast<nn::Module*>(&layer)}) {
    fill(*module, 3);
  }
  for (const auto& y : {linear.forward(x), rms.forward(x), layer.forward(x)}) {
    EXPECT_EQ(y.scalar_type(), at::kBFloat16);
    torch::autograd::backward({y.sum()}, {});
  }
  for (const at::Tensor* p : {&linear.weight, &rms.weight, &layer.weight, &layer.bias}) {
    ASSERT_TRUE(p->grad().defined());
    EXPECT_EQ(p->grad().scalar_type(), at::kFloat);
  }
}

// The same row many times: its gradient is summed in fp32, where bf16 would stop at 256.
TEST(Embedding, GradientIsSummedInTheTablesDtype) {
  nn::Embedding table(5, 2, {});
  const auto rows = table.forward(at::full({1, 1000}, 3, at::kLong), at::kBFloat16);
  EXPECT_EQ(rows.scalar_type(), at::kBFloat16);
  torch::autograd::backward({rows.sum()}, {});
  EXPECT_TRUE(at::equal(table.weight.grad()[3], at::full({2}, 1000.0)));
  EXPECT_EQ(table.weight.grad()[2].abs().max().item<double>(), 0.0);
}

struct Pair : nn::Module {
  Pair() : first(2, 3, {}), norm(3, 1e-6, {}) {
    add_child("first", first);
    add_child("inner.norm", norm);
    add_buffer("count", count, {4}, {});
  }
  nn::Linear first;
  nn::LayerNorm norm;
  at::Tensor count;
};

TEST(Module, NamesAreThePathThroughTheTree) {
  const Pair pair;
  std::vector<std::string> names;
  for (const auto& p : pair.parameters()) names.push_back(p.name);
  EXPECT_THAT(names,
              ::testing::ElementsAre("first.weight", "inner.norm.weight", "inner.norm.bias"));
  ASSERT_EQ(pair.buffers().size(), 1U);
  EXPECT_EQ(pair.buffers()[0].name, "count");
  EXPECT_FALSE(pair.count.requires_grad());
  EXPECT_EQ(pair.parameters()[0].tensor, &pair.first.weight);
}

}  // namespace
}  // namespace longhaul::testing
