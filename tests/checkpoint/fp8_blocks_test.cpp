// Weights into FP8 with scales of blocks and back, element by element.
#include "longhaul/checkpoint/fp8_blocks.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/support/quantized.h"

namespace longhaul::checkpoint {
namespace {

using testing::normal;

struct Quantized {
  at::Tensor weight, scales;

  explicit Quantized(const at::Tensor& matrix)
      : weight(quantize(matrix, block_scales(matrix))), scales(block_scales(matrix)) {}
  at::Tensor back() const { return dequantize(weight, scales); }
};

bool same_bits(const Quantized& a, const Quantized& b) {
  return at::equal(a.weight.view(at::kByte), b.weight.view(at::kByte)) &&
         at::equal(a.scales, b.scales);
}

// Half of the distance between the F8_E4M3 values around a magnitude: 3 bits after the leading one,
// 2^-9 at least.
double half_step(double magnitude) {
  const int exponent = magnitude > 0 ? std::max(std::ilogb(magnitude), -6) : -6;
  return std::ldexp(1.0, exponent - 3) / 2;
}

// How many values are further off than half a step of their block's scale, or no numbers.
int64_t count_wrong(const at::Tensor& matrix, const Quantized& quantized) {
  const at::Tensor x = matrix.to(at::kDouble).contiguous();
  const at::Tensor back = quantized.back().to(at::kDouble);
  const auto expected = x.accessor<double, 2>(), actual = back.accessor<double, 2>();
  const auto scale = quantized.scales.accessor<float, 2>();
  int64_t wrong = 0;
  for (int64_t i = 0; i < x.size(0); ++i) {
    for (int64_t j = 0; j < x.size(1); ++j) {
      const double s = scale[i / 128][j / 128];
      // The product with the scale is rounded to fp32, at worst among its subnormals.
      const double rounding = std::abs(expected[i][j]) * 0x1p-22 + 0x1p-149;
      const double error = std::abs(actual[i][j] - expected[i][j]);
      wrong += !(error <= s * half_step(std::abs(expected[i][j]) / s) + rounding);
    }
  }
  return wrong;
}

// Whole and ragged last blocks, one block, less than one, and nothing; blocks of unequal sizes.
TEST(Fp8Blocks, EveryValueWithinHalfAStepOfItsBlocksScale) {
  for (const auto& [rows, columns] : std::vector<std::pair<int64_t, int64_t>>{{256, 384},
                                                                              {300, 129},
                                                                              {127, 128},
                                                                              {1, 257},
                                                                              {129, 1},
                                                                              {3, 5},
                                                                              {0, 7},
                                                                              {7, 0},
                                                                              {0, 0}}) {
    const at::Tensor x =
        normal({rows, columns}, 3) * normal({rows, 1}, 4) * normal({1, columns}, 5);
    const Quantized quantized(x.to(at::kFloat));
    EXPECT_EQ(quantized.weight.sizes(), x.sizes());
    EXPECT_EQ(quantized.weight.scalar_type(), at::kFloat8_e4m3fn);
    EXPECT_EQ(count_wrong(x.to(at::kFloat), quantized), 0) << rows << " x " << columns;
    const auto [weight, scales] = testing::quantized(x);
    EXPECT_EQ(quantized.scales.sizes(), scales.sizes());
    EXPECT_TRUE(at::allclose(quantized.scales, scales, /*rtol=*/2e-7, /*atol=*/0));
  }
}

TEST(Fp8Blocks, ABlockHasTheScaleOfItsOwnLargestValue) {
  at::Tensor x = at::zeros({200, 300});
  x[127][127] = 448;
  x[127][128] = -896;
  x[128][299] = 0.5;
  const Quantized quantized(x);
  const at::Tensor expected = at::ones({2, 3});
  expected[0][1] = 2;
  expected[1][2] = 0.5f / 448;
  EXPECT_TRUE(at::allclose(quantized.scales, expected, 2e-7, 0)) << quantized.scales;
  EXPECT_EQ(quantized.weight.to(at::kFloat)[127][128].item<float>(), -448);
  EXPECT_TRUE(at::allclose(quantized.back(), x, 2e-7, 0));
}

TEST(Fp8Blocks, Zeros) {
  const Quantized quantized(at::zeros({130, 3}));
  EXPECT_TRUE(at::equal(quantized.scales, at::ones({2, 1})));
  EXPECT_TRUE(at::equal(quantized.back(), at::zeros({130, 3})));
}

// From what rounds to zero through fp32's subnormals to its largest value.
TEST(Fp8Blocks, AnyMagnitude) {
  constexpr double kLargest = std::numeric_limits<float>::max();
  const at::Tensor x = at::clamp(normal({130, 140}, 7), -1, 1);
  for (const double magnitude :
       {1e-45, 0x1p-136, 0x1p-135, 1e-39, 5e-36, 1e-30, 1e-3, 1.0, 1e30, 3.3e38, kLargest}) {
    const at::Tensor weights = (x * magnitude).to(at::kFloat);
    ASSERT_TRUE(at::isfinite(weights).all().item<bool>());
    const Quantized quantized(weights);
    EXPECT_EQ(count_wrong(weights, quantized), 0) << magnitude;
    EXPECT_GE(quantized.scales.min().item<float>(), std::numeric_limits<float>::min());
    const at::Tensor back = quantized.back();
    EXPECT_TRUE(at::isfinite(back).all().item<bool>()) << magnitude;
    EXPECT_TRUE(same_bits(Quantized(back), quantized)) << magnitude;
  }
}

// Two thousand scales: every eighth of plain quotients would differ.
TEST(Fp8Blocks, WhatIsReadIsWrittenAgainBitByBit) {
  const at::Tensor x = normal({3, 128 * 2000}, 11, 0.02, at::kFloat);
  const Quantized once(x);
  EXPECT_TRUE(same_bits(Quantized(once.back()), once));
  const Quantized of_bf16(x.to(at::kBFloat16));
  EXPECT_EQ(count_wrong(x.to(at::kBFloat16), of_bf16), 0);
  EXPECT_TRUE(same_bits(Quantized(of_bf16.back().to(at::kBFloat16)), of_bf16));
}

TEST(Fp8Blocks, OtherTypesByTheirValues) {
  const at::Tensor x = normal({140, 150}, 5, 0.5, at::kHalf);
  const Quantized quantized(x);
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    EXPECT_TRUE(same_bits(Quantized(x.to(dtype)), quantized)) << dtype;
  }
  // Of a stack, and transposed.
  const at::Tensor stack = at::stack({x, x * 2});
  EXPECT_TRUE(same_bits(Quantized(stack[0]), quantized));
  EXPECT_TRUE(same_bits(Quantized(x.t().contiguous().t()), quantized));
}

// Of blocks of their own only.
TEST(Fp8Blocks, ValuesThatAreNotFiniteHaveScalesThatAreNot) {
  for (const double value : {std::nan(""), HUGE_VAL, -HUGE_VAL, 1e39}) {
    at::Tensor x = at::ones({129, 129}, at::kDouble);
    x[128][7] = value;
    const at::Tensor finite = at::isfinite(block_scales(x));
    EXPECT_EQ(finite.sum().item<int64_t>(), 3) << value;
    EXPECT_FALSE(finite[1][0].item<bool>()) << value;
  }
}

// With scales that are too small for it.
TEST(Fp8Blocks, ValuesSaturate) {
  const at::Tensor x = at::full({2, 2}, -1e30, at::kFloat);
  const at::Tensor weight = quantize(x, at::ones({1, 1}));
  EXPECT_TRUE(at::equal(weight.to(at::kFloat), at::full({2, 2}, -448, at::kFloat)));
}

}  // namespace
}  // namespace longhaul::checkpoint
