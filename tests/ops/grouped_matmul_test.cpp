#include "longhaul/ops/grouped_matmul/grouped_matmul.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "tests/support/gradcheck.h"

namespace longhaul::testing {
namespace {

using ::testing::HasSubstr;

// y[r] = weight[e] x[r], row by row.
at::Tensor by_hand(const at::Tensor& x_MK, const at::Tensor& w_ENK,
                   const std::vector<int64_t>& counts) {
  at::Tensor out = at::zeros({x_MK.size(0), w_ENK.size(1)}, at::kDouble);
  auto y = out.accessor<double, 2>();
  const auto x = x_MK.accessor<double, 2>();
  const auto w = w_ENK.accessor<double, 3>();
  int64_t row = 0;
  for (size_t e = 0; e < counts.size(); ++e) {
    for (const int64_t end = row + counts[e]; row < end; ++row) {
      for (int64_t n = 0; n < y.size(1); ++n) {
        for (int64_t k = 0; k < x.size(1); ++k) {
          y[row][n] += w[static_cast<int64_t>(e)][n][k] * x[row][k];
        }
      }
    }
  }
  return out;
}

Function with_counts(const std::vector<int64_t>& counts) {
  return [counts = at::tensor(counts, at::kLong)](const Inputs& x) {
    return ops::grouped_matmul(x[0], x[1], counts);
  };
}

const std::vector<std::vector<int64_t>> kCounts = {
    {2, 3, 1, 4},   // all rows taken
    {0, 7, 0, 1},   // empty groups, 2 rows behind the last
    {0, 0, 10, 0},  // everything to one expert
    {0, 0, 0, 0},
};

TEST(GroupedMatmul, EqualsRowByRow) {
  const auto x = normal({10, 3}, 1), w = normal({4, 5, 3}, 2);
  for (const auto& counts : kCounts) {
    const auto out = with_counts(counts)({x, w});
    EXPECT_LT((out - by_hand(x, w, counts)).abs().max().item<double>(), 1e-14);
  }
}

TEST(GroupedMatmul, Gradients) {
  for (const auto& counts : kCounts) {
    EXPECT_LT(gradient_error(with_counts(counts), {normal({10, 3}, 1), normal({4, 5, 3}, 2)}, 60),
              1e-8);
  }
}

TEST(GroupedMatmul, Precision) {
  const Inputs x = {normal({33, 65}, 1), normal({3, 17, 65}, 2)};
  EXPECT_LT(precision_error(with_counts({20, 0, 11}), x, at::kFloat), 5e-7);
  EXPECT_LT(precision_error(with_counts({20, 0, 11}), x, at::kBFloat16), 3e-3);
}

// Groups that are not a multiple of anything, and NaN in the rows that no group owns.
TEST(GroupedMatmul, NansBehindTheLastGroupDoNotEscape) {
  const std::vector<int64_t> counts = {0, 1, 44, 128};
  for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
    at::Tensor x = normal({192, 64}, 1, 1.0, dtype);
    x.narrow(0, 173, 19).fill_(NAN);
    at::Tensor w = normal({4, 32, 64}, 2, 0.1, dtype);
    x.set_requires_grad(true);
    w.set_requires_grad(true);
    const auto out = ops::grouped_matmul(x, w, at::tensor(counts, at::kLong));
    EXPECT_EQ(out.narrow(0, 173, 19).abs().max().item<double>(), 0.0);
    int64_t begin = 0;
    for (int64_t e = 0; e < 4; ++e) {
      const auto rows = x.detach().narrow(0, begin, counts[e]).to(at::kDouble);
      const auto expected = rows.matmul(w.detach()[e].to(at::kDouble).t());
      const double limit = dtype == at::kDouble ? 1e-14 : dtype == at::kFloat ? 1e-6 : 4e-3;
      if (counts[e] > 0) {
        EXPECT_LT(frobenius_error(out.narrow(0, begin, counts[e]), expected), limit) << e;
      }
      begin += counts[e];
    }
    // The gradient that comes back carries NaN in these rows too.
    at::Tensor dy = normal({192, 32}, 3, 1.0, dtype);
    dy.narrow(0, 173, 19).fill_(NAN);
    torch::autograd::backward({out}, {dy});
    EXPECT_TRUE(x.grad().isfinite().all().item<bool>());
    EXPECT_TRUE(w.grad().isfinite().all().item<bool>());
    EXPECT_EQ(x.grad().narrow(0, 173, 19).abs().max().item<double>(), 0.0);
    EXPECT_EQ(w.grad()[0].abs().max().item<double>(), 0.0) << "the empty expert";
    EXPECT_GT(w.grad()[1].abs().max().item<double>(), 0.0);
  }
}

TEST(GroupedMatmul, ThreadsDoNotChangeABit) {
  const auto run = [](int threads) {
    const int before = at::get_num_threads();
    at::set_num_threads(threads);
    auto result = evaluate(with_counts({100, 7, 0, 93}), {normal({200, 64}, 1, 1, at::kFloat),
                                                          normal({4, 48, 64}, 2, 1, at::kFloat)});
    at::set_num_threads(before);
    return result;
  };
  const auto one = run(1), two = run(2);
  EXPECT_TRUE(at::equal(one.value, two.value));
  EXPECT_TRUE(at::equal(one.gradients[0], two.gradients[0]));
  EXPECT_TRUE(at::equal(one.gradients[1], two.gradients[1]));
}

TEST(GroupedMatmul, BadInput) {
  const auto call = [](at::IntArrayRef x, at::IntArrayRef w, std::vector<int64_t> counts) {
    return message_of(
        [&] { ops::grouped_matmul(at::zeros(x), at::zeros(w), at::tensor(counts, at::kLong)); });
  };
  EXPECT_THAT(
      call({10, 3}, {2, 5, 4}, {1, 1}),
      HasSubstr("expected x [M, K], weight [E, N, K] and E counts, got [10 x 3], [2 x 5 x 4]"));
  EXPECT_THAT(call({10, 3}, {2, 5, 3}, {1, 1, 1}), HasSubstr("3 counts"));
  EXPECT_THAT(call({10, 3}, {2, 5, 3}, {6, 5}), HasSubstr("at most the 10 rows of x, got 11"));
  EXPECT_THAT(call({10, 3}, {2, 5, 3}, {6, -2}), HasSubstr("-2"));
}

}  // namespace
}  // namespace longhaul::testing
