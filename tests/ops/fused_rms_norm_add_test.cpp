// rms_norm_add against addition and rms_norm one after the other, bit by bit, and against the fp64
// reference, for the instruction set that LONGHAUL_ISA names (ctest runs this once for each).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "longhaul/ops/rms_norm/rms_norm.h"
#include "tests/ops/fused_operator.h"

namespace longhaul::testing {
namespace {

using ops::Kernel;
using ::testing::HasSubstr;

constexpr double kEps = 1e-6;

// Which of the results something depends on.
enum class Used { kBoth, kNorm, kSum };

at::Tensor used(const ops::NormedSum& result, Used which) {
  if (which == Used::kNorm) return result.y;
  if (which == Used::kSum) return result.sum * 1;
  return at::cat({result.y, result.sum}, -1);
}

Operator add_and_norm(Used which) {
  return [which](const Inputs& x, Kernel kernel) {
    return used(ops::rms_norm_add(x[0], x[1], x[2], kEps, kernel), which);
  };
}

Operator two_steps(Used which) {
  return [which](const Inputs& x, Kernel kernel) {
    const at::Tensor sum = x[0] + x[1];
    return used({ops::rms_norm(sum, x[2], kEps, kernel), sum}, which);
  };
}

const std::vector<std::pair<int64_t, int64_t>> kShapes = {{1, 7},    {3, 15},   {2, 16},   {5, 21},
                                                          {33, 64},  {4, 129},  {3, 1027}, {0, 24},
                                                          {260, 40}, {2500, 17}};

class FusedRmsNormAdd : public FusedOperator {
 protected:
  static Inputs operands(at::IntArrayRef sizes) {
    return {normal(sizes, 1, 2.0, dtype()), normal(sizes, 2, 1.0, dtype()),
            normal({sizes.back()}, 3, 1.0, at::kFloat)};
  }

  // Value and gradients of one pass and of two steps are the same bits.
  static void expect_as_two_steps(const Inputs& x, Used which, const std::string& what) {
    const auto one = evaluated(add_and_norm(which), x, Kernel::kFused);
    const auto two = evaluated(two_steps(which), x, Kernel::kFused);
    EXPECT_TRUE(at::equal(one.value, two.value)) << what;
    const size_t operands = which == Used::kSum ? 2 : 3;
    for (size_t i = 0; i < operands; ++i) {
      EXPECT_TRUE(at::equal(one.gradients[i], two.gradients[i])) << what << ", gradient " << i;
    }
  }

  static Evaluated evaluated(const Operator& f, const Inputs& x, Kernel kernel) {
    return evaluate([&](const Inputs& leaves) { return f(leaves, kernel); }, x);
  }
};

TEST_P(FusedRmsNormAdd, HasTheBitsOfTwoSteps) {
  for (const auto& [rows, D] : kShapes) {
    for (const Used which : {Used::kBoth, Used::kNorm, Used::kSum}) {
      expect_as_two_steps(operands({rows, D}), which,
                          std::to_string(rows) + " x " + std::to_string(D) + ", used " +
                              std::to_string(static_cast<int>(which)));
    }
  }
}

TEST_P(FusedRmsNormAdd, EqualsReference) {
  roundings_ = 5;  // of the sum, the normalised row, the result; of the gradient's two parts
  for (const auto& [rows, D] : kShapes) {
    const auto x = operands({rows, D});
    expect_as_reference(add_and_norm(Used::kBoth), {x[0], x[1], x[2]},
                        std::to_string(rows) + " x " + std::to_string(D), /*fp32=*/2);
  }
}

// Zeros, sums that cancel, large and small values.
TEST_P(FusedRmsNormAdd, ExtremeValues) {
  const auto weight = normal({40}, 3, 1.0, at::kFloat);
  const auto x = normal({6, 40}, 1, 1.0, dtype());
  expect_as_two_steps({at::zeros_like(x), at::zeros_like(x), weight}, Used::kBoth, "zeros");
  expect_as_two_steps({x, -x, weight}, Used::kBoth, "cancel");
  expect_as_two_steps({x * 1e17, x * 1e12, weight}, Used::kBoth, "large");
  expect_as_two_steps({x * 1e-12, x * 1e-17, weight}, Used::kBoth, "small");
  auto nan = x.clone();
  nan[1][39] = NAN;
  const auto [y, sum] = ops::rms_norm_add(nan, x, weight, kEps, Kernel::kFused);
  EXPECT_TRUE(y[0].isfinite().all().item<bool>());
  EXPECT_TRUE(y[1].isnan().all().item<bool>());
  EXPECT_EQ(sum.isnan().sum().item<int64_t>(), 1);
}

// Rows at any distance from each other; gradients that are slices.
TEST_P(FusedRmsNormAdd, Slices) {
  const Inputs wide = {normal({2, 5, 40}, 1, 1, dtype()), normal({24, 5, 2}, 2, 1, dtype()),
                       normal({24}, 3, 1, at::kFloat)};
  const auto with = [](const Operator& f) -> Operator {
    return [f](const Inputs& x, Kernel kernel) {
      return f({x[0].narrow(-1, 3, 24), x[1].transpose(0, 2), x[2]}, kernel).narrow(-1, 1, 40);
    };
  };
  const auto one = evaluated(with(add_and_norm(Used::kBoth)), wide, Kernel::kFused);
  const auto two = evaluated(with(two_steps(Used::kBoth)), wide, Kernel::kFused);
  EXPECT_TRUE(at::equal(one.value, two.value));
  for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(at::equal(one.gradients[i], two.gradients[i])) << i;
}

// Beyond the size from which results are written past the caches.
TEST_P(FusedRmsNormAdd, LargeResults) {
  const auto x = normal({8400, 128}, 1, 1, dtype()).repeat({1, 8});
  expect_as_two_steps({x, x.flip(0), normal({1024}, 3, 1, at::kFloat)}, Used::kBoth, "large");
}

TEST_P(FusedRmsNormAdd, ThreadsDoNotChangeABit) {
  expect_same_on_any_threads(add_and_norm(Used::kBoth), operands({700, 129}));
}

TEST_P(FusedRmsNormAdd, MetaTensorsHaveTheSizes) {
  expect_meta_sizes(add_and_norm(Used::kBoth), operands({6, 14}));
}

TEST_P(FusedRmsNormAdd, BadInput) {
  const auto call = [](at::IntArrayRef x, at::IntArrayRef residual, at::IntArrayRef weight) {
    return message_of([&] {
      ops::rms_norm_add(at::zeros(x, dtype()), at::zeros(residual, dtype()), at::zeros(weight),
                        kEps, Kernel::kFused);
    });
  };
  EXPECT_THAT(call({2, 3}, {2, 3}, {4}), HasSubstr("weight: expected [3], got [4]"));
  EXPECT_THAT(call({2, 3}, {1, 3}, {3}), HasSubstr("residual: expected [2 x 3], got [1 x 3]"));
  EXPECT_THAT(message_of([&] {
                ops::rms_norm_add(at::zeros({2, 3}, dtype()), at::zeros({2, 3}, at::kDouble),
                                  at::zeros({3}), kEps, Kernel::kFused);
              }),
              HasSubstr("got Double"));
}

INSTANTIATE_TEST_SUITE_P(Dtypes, FusedRmsNormAdd, ::testing::Values(at::kFloat, at::kBFloat16));

}  // namespace
}  // namespace longhaul::testing
