// The fused grouped product against the fp64 reference, for the instruction set that LONGHAUL_ISA
// names (ctest runs this once for each).
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <utility>

#include "longhaul/ops/grouped_matmul/grouped_matmul.h"
#include "tests/ops/fused_operator.h"

namespace longhaul::testing {
namespace {

using ops::Kernel;
using ::testing::HasSubstr;

Operator with_counts(const std::vector<int64_t>& counts) {
  return [counts = at::tensor(counts, at::kLong)](const Inputs& x, Kernel kernel) {
    return ops::grouped_matmul(x[0], x[1], counts, kernel);
  };
}

class FusedGroupedMatmul : public FusedOperator {
 protected:
  static Inputs operands(int64_t M, int64_t N, int64_t K, int64_t E) {
    return {normal({M, K}, 1, 1.0, dtype()), normal({E, N, K}, 2, 0.1, dtype())};
  }
};

// Empty groups, groups of one row, of a task and a row, of rows behind the last.
TEST_P(FusedGroupedMatmul, EqualsReference) {
  expect_as_reference(with_counts({7, 0, 33, 1, 0}), operands(41, 32, 64, 5), "small");
  expect_as_reference(with_counts({0, 12, 0, 1}), operands(20, 96, 32, 4), "rows behind the last");
  expect_as_reference(with_counts({1, 1, 1}), operands(3, 64, 160, 3), "single rows");
  expect_as_reference(with_counts({0, 1025, 0, 511}), operands(1536, 32, 64, 4), "one past a task");
  expect_as_reference(with_counts({512, 513}), operands(1025, 64, 32, 2), "one past a chunk");
}

// Panels of 32 columns, vectors of 16 and pairs of bf16 end anywhere in a row.
TEST_P(FusedGroupedMatmul, AnyWidth) {
  const auto f = with_counts({7, 0, 33, 1});
  for (const int64_t N : {1, 7, 33, 40, 250}) {
    for (const int64_t K : {1, 7, 33, 40, 250}) {
      expect_as_reference(f, operands(43, N, K, 4), fmt::format("{} x {}", N, K));
    }
  }
  expect_as_reference(with_counts({1025, 40}), operands(1070, 17, 15, 2), "several chunks");
}

TEST_P(FusedGroupedMatmul, NoWidth) {
  for (const auto& [N, K] : {std::pair{0, 5}, {5, 0}}) {
    const auto result = evaluated(with_counts({3, 4}), operands(7, N, K, 2), Kernel::kFused);
    EXPECT_EQ(result.value.sizes(), (std::vector<int64_t>{7, N}));
    EXPECT_EQ(result.value.abs().sum().item<double>(), 0);
  }
}

TEST_P(FusedGroupedMatmul, NoRows) {
  for (const int64_t M : {0, 5}) {
    const auto x = operands(M, 32, 64, 2);
    const auto result = evaluated(with_counts({0, 0}), x, Kernel::kFused);
    EXPECT_EQ(result.value.abs().sum().item<double>(), 0);
    for (const auto& gradient : result.gradients) {
      EXPECT_EQ(gradient.abs().sum().item<double>(), 0);
    }
  }
}

// What no group owns is not looked at: neither in rows nor in their gradient.
TEST_P(FusedGroupedMatmul, NanBehindTheLastGroupDoesNotEscape) {
  auto x = operands(50, 32, 64, 2);
  x[0].narrow(0, 41, 9).fill_(NAN);
  for (auto& leaf : x) leaf.set_requires_grad(true);
  const auto out = with_counts({41, 0})(x, Kernel::kFused);
  auto dy = normal({50, 32}, 3, 1.0, dtype());
  dy.narrow(0, 41, 9).fill_(NAN);
  torch::autograd::backward({out}, {dy});
  EXPECT_EQ(out.narrow(0, 41, 9).abs().sum().item<double>(), 0);
  EXPECT_EQ(x[0].grad().narrow(0, 41, 9).abs().sum().item<double>(), 0);
  EXPECT_TRUE(x[0].grad().isfinite().all().item<bool>());
  EXPECT_TRUE(x[1].grad().isfinite().all().item<bool>());
  EXPECT_EQ(x[1].grad()[1].abs().sum().item<double>(), 0) << "the empty group";
}

// What stands behind the end of a row is the next row's.
TEST_P(FusedGroupedMatmul, NanDoesNotLeakIntoTheRowBefore) {
  const auto x = operands(20, 7, 9, 2);
  x[0][3].fill_(NAN);
  const auto out = with_counts({10, 10})(x, Kernel::kFused);
  EXPECT_TRUE(out[3].isnan().all().item<bool>());
  EXPECT_EQ(out.isnan().sum().item<int64_t>(), 7);
  const auto w = operands(20, 7, 9, 2);
  w[1][1][0].fill_(NAN);  // after the last row of the first matrix
  const auto y = with_counts({10, 10})(w, Kernel::kFused);
  EXPECT_EQ(y.isnan().sum().item<int64_t>(), 10);
}

// A NaN in a row stays there, in the value; large values do not overflow on the way.
TEST_P(FusedGroupedMatmul, ExtremeValues) {
  auto x = operands(20, 32, 64, 2);
  x[0][3][5] = NAN;
  const auto out = with_counts({10, 10})(x, Kernel::kFused);
  EXPECT_TRUE(out[3].isnan().all().item<bool>());
  EXPECT_EQ(out.isnan().sum().item<int64_t>(), 32);
  const auto large = operands(20, 32, 64, 2);
  expect_as_reference(with_counts({10, 10}), {large[0] * 1e15, large[1] * 1e15}, "large");
}

TEST_P(FusedGroupedMatmul, ThreadsDoNotChangeABit) {
  const auto f = with_counts({700, 0, 33, 600});
  expect_same_on_any_threads(f, operands(1340, 64, 96, 4));
  expect_same_on_any_threads(f, operands(1340, 37, 51, 4));
}

TEST_P(FusedGroupedMatmul, MetaTensorsHaveTheSizes) {
  expect_meta_sizes(
      [](const Inputs& x, Kernel kernel) {
        const auto counts = at::zeros({3}, at::kLong).to(x[0].device());
        return ops::grouped_matmul(x[0], x[1], counts, kernel);
      },
      operands(6, 32, 64, 3));
}

TEST_P(FusedGroupedMatmul, BadInput) {
  const auto call = [](std::vector<int64_t> counts) {
    return message_of([&] {
      ops::grouped_matmul(at::zeros({10, 32}, dtype()), at::zeros({2, 32, 32}, dtype()),
                          at::tensor(counts, at::kLong), Kernel::kFused);
    });
  };
  EXPECT_THAT(call({6, 5}), HasSubstr("counts: expected together at most"));
  EXPECT_THAT(call({6, -2}), HasSubstr("counts[1]: expected at least 0, got -2"));
  EXPECT_THAT(call({6}), HasSubstr("1 counts"));
}

INSTANTIATE_TEST_SUITE_P(Dtypes, FusedGroupedMatmul, ::testing::Values(at::kFloat, at::kBFloat16));

}  // namespace
}  // namespace longhaul::testing
