#include "longhaul/optim/router_bias.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace longhaul::optim {
namespace {

const at::Tensor kCounts = at::tensor({10, 2, 2, 2}, at::kLong);  // mean 4

TEST(RouterBias, MovesTowardsTheMean) {
  at::Tensor bias = at::zeros({4}, at::kDouble);
  update_router_bias(bias, kCounts, 0.1, /*zero_mean=*/false);
  EXPECT_TRUE(at::allclose(bias, at::tensor({-0.1, 0.1, 0.1, 0.1}, at::kDouble)));
}

TEST(RouterBias, ZeroMeanForm) {
  at::Tensor bias = at::zeros({4}, at::kDouble);
  update_router_bias(bias, kCounts, 0.1, /*zero_mean=*/true);
  EXPECT_TRUE(at::allclose(bias, at::tensor({-0.15, 0.05, 0.05, 0.05}, at::kDouble)));
}

TEST(RouterBias, StaysAtSpeedZeroAndAtBalance) {
  at::Tensor bias = at::ones({4}, at::kDouble);
  update_router_bias(bias, kCounts, 0, true);
  update_router_bias(bias, at::full({4}, 7, at::kLong), 0.1, true);
  EXPECT_TRUE(at::equal(bias, at::ones({4}, at::kDouble)));
}

}  // namespace
}  // namespace longhaul::optim
