#include "longhaul/ops/rotary_mul/rotary_mul.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tests/support/gradcheck.h"

namespace longhaul::testing {
namespace {

using ops::RotaryMode;

struct Angles {
  at::Tensor cos, sin;
};

// theta^(-2i/R) * position, positions [B, S].
Angles angles(const at::Tensor& positions, int64_t R, double theta = 10000.0) {
  const auto i = at::arange(R / 2, at::kDouble);
  const auto a = positions.to(at::kDouble).unsqueeze(-1) * at::pow(theta, -2 * i / R);
  return {a.cos(), a.sin()};
}

// A plane rotation of every pair, written out.
at::Tensor rotated(const at::Tensor& x_BSHR, const Angles& angle, RotaryMode mode) {
  at::Tensor out = x_BSHR.clone();
  const int64_t half = x_BSHR.size(3) / 2;
  auto y = out.accessor<double, 4>();
  const auto x = x_BSHR.accessor<double, 4>();
  const auto cos = angle.cos.accessor<double, 3>(), sin = angle.sin.accessor<double, 3>();
  for (int64_t b = 0; b < x.size(0); ++b) {
    for (int64_t s = 0; s < x.size(1); ++s) {
      for (int64_t h = 0; h < x.size(2); ++h) {
        for (int64_t i = 0; i < half; ++i) {
          const bool pairs = mode == RotaryMode::kInterleaved;
          const int64_t first = pairs ? 2 * i : i, second = pairs ? 2 * i + 1 : i + half;
          const double u = x[b][s][h][first], v = x[b][s][h][second];
          y[b][s][h][first] = u * cos[b][s][i] - v * sin[b][s][i];
          y[b][s][h][second] = u * sin[b][s][i] + v * cos[b][s][i];
        }
      }
    }
  }
  return out;
}

class Rotary : public ::testing::TestWithParam<RotaryMode> {};

TEST_P(Rotary, TurnsEachPairByItsAngle) {
  const auto x = normal({2, 5, 3, 6}, 1);
  const auto angle = angles(integers({2, 5}, 1000, 2), 6);
  const auto out = ops::rotary_mul(x, angle.cos, angle.sin, GetParam());
  EXPECT_LT((out - rotated(x, angle, GetParam())).abs().max().item<double>(), 1e-14);
}

TEST_P(Rotary, WithoutAHeadDimension) {
  const auto x = normal({2, 5, 6}, 1);
  const auto angle = angles(integers({2, 5}, 1000, 2), 6);
  const auto out = ops::rotary_mul(x, angle.cos, angle.sin, GetParam());
  const auto expected = rotated(x.unsqueeze(2), angle, GetParam()).squeeze(2);
  EXPECT_LT((out - expected).abs().max().item<double>(), 1e-14);
}

TEST_P(Rotary, Gradients) {
  const auto angle = angles(integers({2, 3}, 50, 2), 4);
  const auto mode = GetParam();
  const Function f = [&](const Inputs& x) {
    return ops::rotary_mul(x[0], angle.cos, angle.sin, mode);
  };
  EXPECT_LT(gradient_error(f, {normal({2, 3, 2, 4}, 1)}), 1e-8);
}

// bf16: one rounding of the result, 2^-9 at most.
TEST_P(Rotary, Precision) {
  const auto angle = angles(integers({2, 9}, 5000, 2), 16);
  const auto mode = GetParam();
  const Function f = [&](const Inputs& x) {
    return ops::rotary_mul(x[0], angle.cos, angle.sin, mode);
  };
  EXPECT_LT(precision_error(f, {normal({2, 9, 4, 16}, 1)}, at::kFloat), 2e-7);
  EXPECT_LT(precision_error(f, {normal({2, 9, 4, 16}, 1)}, at::kBFloat16), 3e-3);
}

// Scores depend on the distance of two positions only.
TEST_P(Rotary, ScoresAreRelative) {
  const auto q = normal({1, 1, 8}, 1), k = normal({1, 1, 8}, 2);
  const auto score = [&](int64_t at_q, int64_t at_k) {
    const auto a = angles(at::full({1, 1}, at_q, at::kLong), 8);
    const auto b = angles(at::full({1, 1}, at_k, at::kLong), 8);
    return (ops::rotary_mul(q, a.cos, a.sin, GetParam()) *
            ops::rotary_mul(k, b.cos, b.sin, GetParam()))
        .sum()
        .item<double>();
  };
  EXPECT_NEAR(score(9, 4), score(70005, 70000), 1e-9);
  EXPECT_GT(std::abs(score(9, 4) - score(9, 5)), 1e-3);
}

INSTANTIATE_TEST_SUITE_P(Modes, Rotary,
                         ::testing::Values(RotaryMode::kInterleaved, RotaryMode::kHalfSplit));

// rope_dim 8, theta 10000, position 1, q = e_0: which dims the rotation mixes tells the mode.
TEST(RotaryMul, ModesMixDifferentDims) {
  at::Tensor q = at::zeros({1, 1, 8}, at::kDouble);
  q[0][0][0] = 1;
  const auto angle = angles(at::ones({1, 1}, at::kLong), 8);
  const auto expect = [&](RotaryMode mode, int64_t partner) {
    const auto out = ops::rotary_mul(q, angle.cos, angle.sin, mode);
    for (int64_t i = 0; i < 8; ++i) {
      const double wanted = i == 0 ? std::cos(1.0) : i == partner ? std::sin(1.0) : 0.0;
      EXPECT_NEAR(out[0][0][i].item<double>(), wanted, 1e-15) << i;
    }
  };
  expect(RotaryMode::kHalfSplit, 4);
  expect(RotaryMode::kInterleaved, 1);
}

TEST(RotaryMul, ShapesThatDoNotFit) {
  const auto angle = angles(at::zeros({2, 5}, at::kLong), 6);
  const auto message = [&](at::IntArrayRef sizes) {
    return message_of(
        [&] { ops::rotary_mul(at::zeros(sizes), angle.cos, angle.sin, RotaryMode::kHalfSplit); });
  };
  EXPECT_THAT(message({2, 5, 1, 8}),
              ::testing::HasSubstr("cos: expected [2 x 5 x 4], got [2 x 5 x 3]"));
  EXPECT_THAT(message({3, 5, 1, 6}), ::testing::HasSubstr("cos: expected [3 x 5 x 3]"));
  EXPECT_THAT(message({2, 5, 1, 7}), ::testing::HasSubstr("pairs of x [2 x 5 x 1 x 7]"));
}

}  // namespace
}  // namespace longhaul::testing
