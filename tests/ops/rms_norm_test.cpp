#include "longhaul/ops/rms_norm/rms_norm.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tests/support/gradcheck.h"

namespace longhaul::testing {
namespace {

constexpr double kEps = 1e-6;
const Function kNorm = [](const Inputs& x) { return ops::rms_norm(x[0], x[1], kEps); };

TEST(RmsNorm, EqualsTheFormula) {
  const auto x = normal({3, 1, 7}, 1, 2.0), w = normal({7}, 2);
  const auto out = ops::rms_norm(x, w, 0.1);
  for (int64_t row = 0; row < 3; ++row) {
    double sum = 0;
    for (int64_t i = 0; i < 7; ++i) sum += std::pow(x[row][0][i].item<double>(), 2);
    for (int64_t i = 0; i < 7; ++i) {
      const double expected =
          w[i].item<double>() * x[row][0][i].item<double>() / std::sqrt(sum / 7 + 0.1);
      EXPECT_NEAR(out[row][0][i].item<double>(), expected, 1e-14);
    }
  }
}

TEST(RmsNorm, Gradients) {
  EXPECT_LT(gradient_error(kNorm, {normal({2, 3, 5}, 1), normal({5}, 2)}), 1e-7);
  // One feature: x / |x| hardly changes, so its gradient is of the order of eps.
  EXPECT_LT(gradient_error(kNorm, {normal({4, 1}, 1), normal({1}, 2)}), 1e-5);
}

// bf16: the normalised value and the product are rounded (2^-9 each), and so is the gradient.
TEST(RmsNorm, Precision) {
  const Inputs x = {normal({32, 129}, 1), normal({129}, 2)};
  EXPECT_LT(precision_error(kNorm, x, at::kFloat), 5e-7);
  EXPECT_LT(precision_error(kNorm, x, at::kBFloat16), 6e-3);
}

TEST(RmsNorm, RoundsBeforeTheWeight) {
  const auto x = normal({4, 16}, 1, 1.0, at::kBFloat16), w = normal({16}, 2, 1.0, at::kBFloat16);
  const auto wide = x.to(at::kFloat);
  const auto normed = wide / (wide.square().mean(-1, true) + kEps).sqrt();
  EXPECT_LT((ops::rms_norm(x, w, kEps) - normed.to(at::kBFloat16) * w).abs().max().item<double>(),
            2e-2);
  EXPECT_EQ(ops::rms_norm(x, w.to(at::kFloat), kEps).scalar_type(), at::kBFloat16);
}

TEST(RmsNorm, ZerosStayZeroWithAFiniteGradient) {
  const auto result = evaluate(kNorm, {at::zeros({2, 4}, at::kDouble), normal({4}, 2)});
  EXPECT_EQ(result.value.abs().max().item<double>(), 0.0);
  EXPECT_TRUE(result.gradients[0].isfinite().all().item<bool>());
}

TEST(RmsNorm, WeightOfAnotherWidth) {
  EXPECT_THAT(message_of([] {
                ops::rms_norm(at::zeros({2, 3}), at::zeros({1}), kEps);
              }),
              ::testing::HasSubstr("weight: expected [3], got [1]"));
  for (const auto kernel : {ops::Kernel::kReference, ops::Kernel::kFused}) {
    EXPECT_THAT(message_of([&] { ops::rms_norm(at::ones({}), at::ones({1}), kEps, kernel); }),
                ::testing::HasSubstr("rms_norm: x: expected at least 1 dimension, got []"));
  }
}

TEST(RmsNorm, NoFeaturesAndIntegers) {
  const auto forward = [](const at::Tensor& x) {
    return message_of([&] { ops::rms_norm_forward(x, {}, at::ones({x.size(-1)}), kEps); });
  };
  EXPECT_THAT(forward(at::zeros({2, 0})),
              ::testing::HasSubstr("x [2 x 0]: expected at least one feature"));
  EXPECT_THAT(forward(at::zeros({2, 3}, at::kLong)),
              ::testing::HasSubstr("x: expected floating-point numbers, got Long"));
}

}  // namespace
}  // namespace longhaul::testing
