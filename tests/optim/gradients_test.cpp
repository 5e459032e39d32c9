#include "longhaul/optim/gradients.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

namespace longhaul::optim {
namespace {

struct Parameters {
  at::Tensor a = at::zeros({2}), b = at::zeros({2, 2}), frozen = at::zeros({3});
  std::vector<nn::NamedParameter> list = {{"a", &a, nn::Init::kZeros},
                                          {"b", &b, nn::Init::kZeros},
                                          {"frozen", &frozen, nn::Init::kZeros}};
};

TEST(Gradients, NormsOverAllThatExist) {
  Parameters p;
  EXPECT_EQ(gradient_norm(p.list, 2), 0);
  p.a.mutable_grad() = at::tensor({3.0F, -4.0F}, at::kFloat);
  p.b.mutable_grad() = at::tensor({0.0F, 12.0F, 0.0F, 0.0F}, at::kFloat).view({2, 2});
  EXPECT_NEAR(gradient_norm(p.list, 2), 13, 1e-6);
  EXPECT_NEAR(gradient_norm(p.list, INFINITY), 12, 1e-6);
  EXPECT_NEAR(gradient_norm(p.list, 1), 19, 1e-6);
}

TEST(Gradients, Bf16GradientsAreSummedWider) {
  at::Tensor x = at::zeros({1000}, at::kBFloat16);
  x.mutable_grad() = at::ones({1000}, at::kBFloat16);
  EXPECT_NEAR(gradient_norm({{"x", &x, nn::Init::kZeros}}, 2), std::sqrt(1000.0), 1e-3);
}

TEST(Gradients, ClipFactor) {
  EXPECT_EQ(clip_factor(0.5, 1.0), 1.0);
  EXPECT_NEAR(clip_factor(4.0, 1.0), 1.0 / (4.0 + 1e-6), 1e-15);
  EXPECT_EQ(clip_factor(1e30, INFINITY), 1.0);
}

}  // namespace
}  // namespace longhaul::optim
