// The fused cross-entropy against the fp64 reference, for the instruction set that LONGHAUL_ISA
// names (ctest runs this once for each), and what it allocates.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "longhaul/ops/cross_entropy/cross_entropy.h"
#include "longhaul/ops/matmul/matmul.h"
#include "tests/ops/allocations.h"
#include "tests/ops/fused_operator.h"

namespace longhaul::testing {
namespace {

using ops::Kernel;
using ::testing::HasSubstr;

// Every fifth label is ignored.
at::Tensor some_labels(int64_t T, int64_t V) {
  return integers({T}, V, 3).masked_fill_(at::arange(T).remainder(5) == 4, ops::kIgnoredLabel);
}

Operator loss_of(const at::Tensor& labels) {
  return [labels](const Inputs& x, Kernel kernel) {
    return ops::linear_cross_entropy(x[0], x[1], labels, kernel);
  };
}

class FusedCrossEntropy : public FusedOperator {
 protected:
  at::ScalarType value_dtype() const override { return at::kFloat; }
};

// Vocabularies around the width of a vector, of four vectors and of a block of the kernel.
TEST_P(FusedCrossEntropy, EqualsReference) {
  roundings_ = 3;  // of the logits, of their gradient and of its product, scaled
  const std::vector<std::vector<int64_t>> shapes = {
      {1, 1, 1},    {1, 3, 2},     {7, 5, 15},     {9, 8, 16},     {5, 21, 17}, {33, 64, 63},
      {64, 40, 64}, {17, 7, 1027}, {40, 33, 2048}, {12, 16, 4099}, {0, 8, 24},  {130, 129, 300}};
  for (const auto& s : shapes) {
    const int64_t T = s[0], D = s[1], V = s[2];
    if (V == 1) continue;  // the gradient is 0 but for rounding, see below
    expect_as_reference(loss_of(some_labels(T, V)),
                        {normal({T, D}, 1), normal({V, D}, 2, 1 / std::sqrt(double(D)))},
                        std::to_string(T) + " x " + std::to_string(D) + " x " + std::to_string(V));
  }
}

TEST_P(FusedCrossEntropy, OneWordIsCertain) {
  const auto result = evaluate(
      [](const Inputs& x) { return loss_of(at::zeros({3}, at::kLong))(x, Kernel::kFused); },
      {normal({3, 4}, 1).to(dtype()), normal({1, 4}, 2).to(dtype())});
  EXPECT_EQ(result.value.item<double>(), 0.0);
  for (const auto& d : result.gradients) EXPECT_LT(d.abs().max().item<double>(), 1e-6);
}

TEST_P(FusedCrossEntropy, AllLabelsIgnored) {
  const auto f = loss_of(at::full({7}, ops::kIgnoredLabel, at::kLong));
  const auto result = evaluate([&](const Inputs& x) { return f(x, Kernel::kFused); },
                               {normal({7, 3}, 1).to(dtype()), normal({40, 3}, 2).to(dtype())});
  EXPECT_EQ(result.value.item<double>(), 0.0);
  for (const auto& d : result.gradients) EXPECT_EQ(d.abs().max().item<double>(), 0.0);
}

// Products of small whole numbers and a power of two: logits of 1e4 that bf16 holds exactly.
TEST_P(FusedCrossEntropy, ExtremeLogits) {
  const auto hidden = at::tensor({128., -128., 1., 0., -64., 128.}).view({6, 1});
  auto weight = at::arange(-80, 80, at::kDouble).view({160, 1}).repeat({3, 1});
  weight[200] = 79;  // ties at the top
  const auto labels = at::tensor({159, 0, 80, 5, -100, 7}, at::kLong);
  expect_as_reference(loss_of(labels), {hidden, weight}, "1e4");
}

// What is not a number reaches the loss, but not from a row that is ignored.
TEST_P(FusedCrossEntropy, NotFinite) {
  const auto weight = at::ones({2100, 1}, dtype());
  const auto loss_at = [&](double x, int64_t label) {
    const auto hidden = at::tensor({1.0, x}).view({2, 1}).to(dtype());
    const at::Tensor labels = at::tensor({int64_t{1}, label}, at::kLong);
    const at::Tensor loss = ops::linear_cross_entropy(hidden, weight, labels, Kernel::kFused);
    return loss.item<double>();
  };
  EXPECT_TRUE(std::isnan(loss_at(NAN, 1)));
  EXPECT_TRUE(std::isnan(loss_at(INFINITY, 1)));
  EXPECT_NEAR(loss_at(NAN, ops::kIgnoredLabel), std::log(2100.0), 1e-5);
  auto holes = weight.clone();
  holes.narrow(0, 0, 2090).fill_(-INFINITY);  // a whole block of the kernel, and more
  const auto loss = ops::linear_cross_entropy(at::ones({1, 1}, dtype()), holes,
                                              at::full({1}, 2095, at::kLong), Kernel::kFused);
  EXPECT_NEAR(loss.item<double>(), std::log(10.0), 1e-5);
}

// More logits than exist at a time: the same as the tokens in smaller calls.
TEST_P(FusedCrossEntropy, ManyTokens) {
  constexpr int64_t T = 1200, V = 32000, D = 8, kPiece = 300;
  const auto hidden = normal({T, D}, 1, 1, dtype()), weight = normal({V, D}, 2, 0.5, dtype());
  const auto labels = some_labels(T, V);
  const auto run = [&](int64_t from, int64_t count) {
    const Inputs leaves = {hidden.narrow(0, from, count).detach().set_requires_grad(true),
                           weight.to(at::kFloat).set_requires_grad(true)};
    const auto loss = ops::linear_cross_entropy(leaves[0], leaves[1], labels.narrow(0, from, count),
                                                Kernel::kFused);
    const auto d = torch::autograd::grad({loss}, leaves);
    return Inputs{loss.detach(), d[0], d[1]};
  };
  const auto whole = run(0, T);
  auto loss = at::zeros({}), d_weight = at::zeros({V, D});
  for (int64_t from = 0; from < T; from += kPiece) {
    const auto piece = run(from, kPiece);
    loss += piece[0];
    d_weight += piece[2];
    EXPECT_LT(error(piece[1], whole[1].narrow(0, from, kPiece)), limit()) << from;
  }
  EXPECT_LT(error(loss, whole[0]), 1e-6);
  EXPECT_LT(error(d_weight, whole[2]), limit());
}

// The weight may stay in fp32: cast for the products, its gradient is not rounded on the way.
TEST_P(FusedCrossEntropy, WeightInFp32) {
  const auto hidden = normal({40, 24}, 1, 1, dtype()),
             weight = normal({70, 24}, 2, 0.2, at::kFloat);
  const auto f = [&](const Inputs& x) { return loss_of(some_labels(40, 70))(x, Kernel::kFused); };
  const auto wide = evaluate(f, {hidden, weight}), same = evaluate(f, {hidden, weight.to(dtype())});
  EXPECT_TRUE(at::equal(wide.value, same.value));
  EXPECT_TRUE(at::equal(wide.gradients[0], same.gradients[0]));
  EXPECT_EQ(wide.gradients[1].scalar_type(), at::kFloat);
  EXPECT_TRUE(at::equal(wide.gradients[1].to(dtype()), same.gradients[1]));
}

// The factor that a mean brings is not rounded to bf16.
TEST_P(FusedCrossEntropy, ScaledByTheGradientOfTheLoss) {
  const auto hidden = normal({9, 8}, 1, 1, dtype()), weight = normal({20, 8}, 2, 1, at::kFloat);
  const auto gradients = [&](double divisor) {
    const Inputs leaves = {hidden.detach().set_requires_grad(true),
                           weight.detach().set_requires_grad(true)};
    const auto loss = loss_of(some_labels(9, 20))(leaves, Kernel::kFused);
    return torch::autograd::grad({loss / divisor}, leaves);
  };
  const auto sum = gradients(1), mean = gradients(3);
  // 1/3 in bf16 is off by 1.3e-3, in fp32 by 3e-8; the result is rounded once.
  const auto expected = (sum[0].to(at::kFloat) / 3).to(dtype());
  EXPECT_LT(error(mean[0], expected), dtype() == at::kFloat ? 1e-7 : 1e-4);
  EXPECT_LT(error(mean[1], sum[1] / 3), 1e-7);
}

TEST_P(FusedCrossEntropy, OnlyWhatIsAskedFor) {
  const auto hidden = normal({9, 8}, 1, 1, dtype()), weight = normal({20, 8}, 2, 1, dtype());
  const auto f = loss_of(some_labels(9, 20));
  const auto both =
      evaluate([&](const Inputs& x) { return f(x, Kernel::kFused); }, {hidden, weight});
  for (const size_t one : {0, 1}) {
    Inputs x = {hidden.clone(), weight.clone()};
    x[one].set_requires_grad(true);
    const auto alone = torch::autograd::grad({weighed(f(x, Kernel::kFused))}, {x[one]})[0];
    EXPECT_TRUE(at::equal(alone, both.gradients[one])) << one;
  }
  EXPECT_FALSE(f({hidden, weight}, Kernel::kFused).requires_grad());
}

// Where MKL makes the products their bits depend on the number of threads, and on nothing else.
TEST_P(FusedCrossEntropy, ThreadsDoNotChangeABit) {
  const bool mkl = ops::fp32_product_kernels().starts_with("MKL");
  expect_same_on_any_threads(
      loss_of(some_labels(300, 1003)),
      {normal({300, 129}, 1, 1, dtype()), normal({1003, 129}, 2, 0.1, dtype())},
      mkl ? std::vector<int>{2, 2, 2} : std::vector<int>{1, 2, 3});
}

TEST_P(FusedCrossEntropy, MetaTensorsHaveTheSizes) {
  const Operator f = [](const Inputs& x, Kernel kernel) {
    return ops::linear_cross_entropy(x[0], x[1], at::zeros({6}, x[0].options().dtype(at::kLong)),
                                     kernel);
  };
  expect_meta_sizes(f, {normal({6, 14}, 1, 1, dtype()), normal({30, 14}, 2, 1, at::kFloat)});
}

TEST_P(FusedCrossEntropy, NoTensorOfAllLogits) {
  constexpr int64_t T = 3000, V = 16384, D = 4, kMost = int64_t{64} << 20;
  const auto hidden = normal({T, D}, 1, 1, dtype()).set_requires_grad(true);
  const auto weight = normal({V, D}, 2, 1, dtype()).set_requires_grad(true);
  ASSERT_GT(T * V * hidden.element_size(), kMost);
  const int64_t largest = largest_allocation([&] {
    const auto loss =
        ops::linear_cross_entropy(hidden, weight, integers({T}, V, 3), Kernel::kFused);
    torch::autograd::grad({loss}, {hidden, weight});
  });
  EXPECT_GE(largest, kMost / 2);  // it does see the tile, which is in bf16 where products are
  EXPECT_LE(largest, kMost);
}

TEST_P(FusedCrossEntropy, DifferentiatedTwiceIsRefused) {
  const auto hidden = normal({6, 4}, 1, 1, dtype()).set_requires_grad(true);
  const auto loss = ops::linear_cross_entropy(hidden, normal({9, 4}, 2, 1, dtype()),
                                              at::zeros({6}, at::kLong), Kernel::kFused);
  torch::autograd::grad({loss}, {hidden}, {}, /*retain_graph=*/true);
  EXPECT_THAT(message_of([&] { torch::autograd::grad({loss}, {hidden}); }),
              HasSubstr("can be differentiated once"));
}

TEST_P(FusedCrossEntropy, BadInput) {
  const auto call = [](at::IntArrayRef hidden, at::IntArrayRef weight, int64_t label) {
    return message_of([&] {
      ops::linear_cross_entropy(at::zeros(hidden, dtype()), at::zeros(weight, dtype()),
                                at::full({7}, label, at::kLong), Kernel::kFused);
    });
  };
  EXPECT_THAT(call({6, 3}, {5, 3}, 0), HasSubstr("expected [7 x 3], got [6 x 3]"));
  for (const int64_t label : {5, -1, -99}) {
    EXPECT_THAT(call({7, 3}, {5, 3}, label),
                HasSubstr(fmt::format("a label is out of bounds: expected -100 or 0 to 4 (V "
                                      "- 1), got {} in row 0",
                                      label)));
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, FusedCrossEntropy, ::testing::Values(at::kFloat, at::kBFloat16));

// fp64 takes the reference.
TEST(CrossEntropyFused, OtherDtypesTakeTheReference) {
  const auto h = normal({3, 8}, 1), w = normal({5, 8}, 2);
  const auto labels = at::zeros({3}, at::kLong);
  EXPECT_TRUE(at::equal(ops::linear_cross_entropy(h, w, labels, Kernel::kFused),
                        ops::linear_cross_entropy(h, w, labels)));
}

}  // namespace
}  // namespace longhaul::testing
