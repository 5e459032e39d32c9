#include "longhaul/ops/matmul/matmul.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/gradcheck.h"

namespace longhaul::testing {
namespace {

using ::testing::HasSubstr;

// a [B, M, K] times b [B, K, N], by three loops in double.
at::Tensor by_hand(const at::Tensor& a_BMK, const at::Tensor& b_BKN) {
  const auto wide_a = a_BMK.to(at::kDouble), wide_b = b_BKN.to(at::kDouble);
  const auto a = wide_a.accessor<double, 3>(), b = wide_b.accessor<double, 3>();
  at::Tensor out = at::zeros({a.size(0), a.size(1), b.size(2)}, at::kDouble);
  auto c = out.accessor<double, 3>();
  for (int64_t i = 0; i < c.size(0); ++i) {
    for (int64_t m = 0; m < c.size(1); ++m) {
      for (int64_t n = 0; n < c.size(2); ++n) {
        for (int64_t k = 0; k < a.size(2); ++k) c[i][m][n] += a[i][m][k] * b[i][k][n];
      }
    }
  }
  return out;
}

at::Tensor by_hand_2d(const at::Tensor& a, const at::Tensor& b) {
  return by_hand(a.unsqueeze(0), b.unsqueeze(0)).squeeze(0);
}

// Largest error over the largest value: sums of up to 70 terms. bf16: one rounding of the result.
double tolerance(at::ScalarType dtype) {
  return dtype == at::kDouble ? 1e-14 : dtype == at::kFloat ? 1e-6 : 4e-3;
}

double error(const at::Tensor& actual, const at::Tensor& expected) {
  return ((actual.to(at::kDouble) - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
      .item<double>();
}

class ProductOf : public ::testing::TestWithParam<at::ScalarType> {
 protected:
  at::Tensor random(at::IntArrayRef sizes, uint64_t seed) const {
    return normal(sizes, seed, 1.0, GetParam());
  }
  double limit() const { return tolerance(GetParam()); }
};

TEST_P(ProductOf, OddSizesIn2dAnd3d) {
  const int64_t shapes[][4] = {
      {1, 1, 1, 1}, {1, 1, 70, 1}, {2, 3, 5, 7}, {3, 17, 33, 65}, {1, 64, 1, 31}};
  for (const auto& [B, M, K, N] : shapes) {
    const auto a = random({B, M, K}, 1), b = random({B, K, N}, 2);
    const auto expected = by_hand(a, b);
    EXPECT_LT(error(ops::product(a, b), expected), limit()) << B << M << K << N;
    EXPECT_LT(error(ops::product(a[0], b[0]), expected[0]), limit()) << M << K << N;
  }
}

TEST_P(ProductOf, TransposedAndStridedViews) {
  const auto a = random({2, 9, 6}, 1), b = random({2, 11, 9}, 2);
  EXPECT_LT(error(ops::product(a.transpose(1, 2), b.transpose(1, 2)),
                  by_hand(a.transpose(1, 2), b.transpose(1, 2))),
            limit());
  EXPECT_LT(error(ops::product(a[1].t(), b[0].t()), by_hand_2d(a[1].t(), b[0].t())), limit());
  // Every second column; heads in the middle, as attention has them.
  const auto c = random({9, 14}, 3).slice(1, 0, 14, 2), d = random({7, 5}, 4);
  EXPECT_LT(error(ops::product(c, d), by_hand_2d(c, d)), limit());
  const auto heads = random({5, 3, 4}, 5).transpose(0, 1), keys = random({3, 4, 6}, 6);
  EXPECT_LT(error(ops::product(heads, keys), by_hand(heads, keys)), limit());
}

TEST_P(ProductOf, WritesIntoAPartOfATensor) {
  at::Tensor whole = at::full({10, 8}, 5.0).to(GetParam());
  at::Tensor part = whole.narrow(0, 2, 3).narrow(1, 1, 4);
  const auto a = random({3, 6}, 1), b = random({6, 4}, 2);
  ops::product_out(a, b, part);
  EXPECT_LT(error(part, by_hand_2d(a, b)), limit());
  part.fill_(5);
  EXPECT_TRUE(at::equal(whole, at::full({10, 8}, 5.0).to(GetParam()))) << "wrote beside the part";
}

TEST_P(ProductOf, BetaOneAdds) {
  for (const bool batched : {false, true}) {
    const auto a = random({2, 3, 6}, 1), b = random({2, 6, 5}, 2);
    const at::Tensor first = random({2, 3, 5}, 3);
    at::Tensor out = batched ? first.clone() : first[0].clone();
    ops::product_out(batched ? a : a[0], batched ? b : b[0], out, 1.0F);
    const auto expected = by_hand(a, b) + first.to(at::kDouble);
    EXPECT_LT(error(out, batched ? expected : expected[0]), limit());
  }
}

TEST_P(ProductOf, WithoutTermsTheSumIsZero) {
  const auto a = random({2, 3, 0}, 1), b = random({2, 0, 5}, 2);
  EXPECT_TRUE(at::equal(ops::product(a, b), at::zeros({2, 3, 5}).to(GetParam())));
  at::Tensor out = at::ones({3, 5}).to(GetParam());
  ops::product_out(a[0], b[0], out, 1.0F);
  EXPECT_TRUE(at::equal(out, at::ones({3, 5}).to(GetParam())));
  ops::product_out(a[0], b[0], out);
  EXPECT_TRUE(at::equal(out, at::zeros({3, 5}).to(GetParam())));
  EXPECT_EQ(ops::product(random({0, 4}, 1), random({4, 5}, 2)).size(0), 0);
}

TEST_P(ProductOf, IsOutsideAutogradWhateverTheOperandsWant) {
  const auto a = random({3, 6}, 1).set_requires_grad(true), b = random({6, 5}, 2);
  EXPECT_FALSE(ops::product(a, b).requires_grad());
}

TEST_P(ProductOf, NansInTheOldResultDoNotStay) {
  at::Tensor out = at::full({3, 5}, NAN).to(GetParam());
  ops::product_out(random({3, 6}, 1), random({6, 5}, 2), out);
  EXPECT_TRUE(out.isfinite().all().item<bool>());
}

INSTANTIATE_TEST_SUITE_P(Dtypes, ProductOf,
                         ::testing::Values(at::kDouble, at::kFloat, at::kBFloat16),
                         [](const auto& info) { return std::string(c10::toString(info.param)); });

// fp64, which only references use, goes through MKL, whose sums depend on the number of threads.
TEST(Product, ThreadsDoNotChangeABit) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const auto a = normal({2, 130, 257}, 1, 1, dtype), b = normal({2, 257, 67}, 2, 1, dtype);
    const auto products = [&](int threads) {
      const int before = at::get_num_threads();
      at::set_num_threads(threads);
      const std::vector<at::Tensor> result = {ops::product(a, b), ops::product(a[0], b[0]),
                                              ops::product(b.transpose(1, 2), a.transpose(1, 2))};
      at::set_num_threads(before);
      return result;
    };
    const auto one = products(1), two = products(2);
    for (size_t i = 0; i < one.size(); ++i) EXPECT_TRUE(at::equal(one[i], two[i])) << dtype << i;
  }
}

const Function kLinear = [](const Inputs& x) { return ops::linear(x[0], x[1]); };
const Function kBmm = [](const Inputs& x) { return ops::bmm(x[0], x[1]); };

TEST(Linear, KeepsLeadingDimensions) {
  const auto x = normal({2, 3, 4}, 1), w = normal({5, 4}, 2);
  const auto out = ops::linear(x, w);
  EXPECT_EQ(out.sizes(), at::IntArrayRef({2, 3, 5}));
  EXPECT_LT(error(out.view({6, 5}), by_hand_2d(x.view({6, 4}), w.t())), 1e-14);
  EXPECT_EQ(ops::linear(normal({4}, 1), w).sizes(), at::IntArrayRef({5})) << "a single vector";
}

TEST(Linear, EmptyInput) {
  EXPECT_EQ(ops::linear(at::zeros({0, 4}), at::zeros({5, 4})).sizes(), at::IntArrayRef({0, 5}));
  EXPECT_TRUE(at::equal(ops::linear(at::ones({2, 0}), at::ones({5, 0})), at::zeros({2, 5})));
}

TEST(Linear, Gradients) {
  EXPECT_LT(gradient_error(kLinear, {normal({2, 3, 4}, 1), normal({5, 4}, 2)}), 1e-8);
  const Function transposed = [](const Inputs& x) {
    return ops::linear(x[0].transpose(0, 1), x[1].t());
  };
  EXPECT_LT(gradient_error(transposed, {normal({2, 3, 4}, 1), normal({4, 5}, 2)}), 1e-8);
}

TEST(Bmm, Gradients) {
  EXPECT_LT(gradient_error(kBmm, {normal({2, 3, 4}, 1), normal({2, 4, 5}, 2)}), 1e-8);
  const Function transposed = [](const Inputs& x) {
    return ops::bmm(x[0].transpose(1, 2), x[1].transpose(0, 1));
  };
  EXPECT_LT(gradient_error(transposed, {normal({2, 4, 3}, 1), normal({4, 2, 5}, 2)}), 1e-8);
}

TEST(Bmm, Precision) {
  const Inputs x = {normal({3, 17, 129}, 1), normal({3, 129, 9}, 2)};
  EXPECT_LT(precision_error(kBmm, x, at::kFloat), 5e-7);
  EXPECT_LT(precision_error(kBmm, x, at::kBFloat16), 3e-3);  // one rounding of each result
}

TEST(Product, ShapesAndDtypesThatDoNotFit) {
  at::Tensor small = at::zeros({2, 4});
  EXPECT_THAT(message_of([] {
                ops::product(at::zeros({2, 3}), at::zeros({4, 5}));
              }),
              HasSubstr("got [2 x 3] and [4 x 5]"));
  EXPECT_THAT(message_of([] {
                ops::bmm(at::zeros({2, 3, 4}), at::zeros({3, 4, 5}));
              }),
              HasSubstr("got [2 x 3 x 4] and [3 x 4 x 5]"));
  EXPECT_THAT(message_of([] { ops::product(at::zeros({3}), at::zeros({3})); }),
              HasSubstr("got [3] and [3]"));
  EXPECT_THAT(message_of([&] {
                ops::product_out(at::zeros({2, 3}), at::zeros({3, 5}), small);
              }),
              HasSubstr("expected [2 x 5], got [2 x 4]"));
  EXPECT_THAT(message_of([] {
                ops::linear(at::zeros({2, 3}), at::zeros({5, 4}));
              }),
              HasSubstr("weight: expected [N, 3], got [5 x 4]"));
  EXPECT_THAT(message_of([] {
                ops::linear(at::zeros({2, 3}), at::zeros({5, 3}, at::kBFloat16));
              }),
              HasSubstr("expected Float, the dtype of the input, got BFloat16"));
}

}  // namespace
}  // namespace longhaul::testing
