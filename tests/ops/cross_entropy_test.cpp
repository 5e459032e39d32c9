#include "longhaul/ops/cross_entropy/cross_entropy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>

#include "tests/support/gradcheck.h"

namespace longhaul::testing {
namespace {

const at::Tensor kLabels = at::tensor({2, -100, 0, 4, -100, 2, 1}, at::kLong);
const Function kLoss = [](const Inputs& x) {
  return ops::linear_cross_entropy(x[0], x[1], kLabels);
};

double by_hand(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& labels) {
  const auto h = hidden.accessor<double, 2>(), w = weight.accessor<double, 2>();
  double loss = 0;
  for (int64_t t = 0; t < h.size(0); ++t) {
    const int64_t label = labels[t].item<int64_t>();
    if (label == -100) continue;
    std::vector<double> logits(w.size(0), 0.0);
    for (int64_t v = 0; v < w.size(0); ++v) {
      for (int64_t d = 0; d < h.size(1); ++d) logits[v] += w[v][d] * h[t][d];
    }
    const double largest = *std::max_element(logits.begin(), logits.end());
    double sum = 0;
    for (const double x : logits) sum += std::exp(x - largest);
    loss += largest + std::log(sum) - logits[label];
  }
  return loss;
}

TEST(CrossEntropy, IsASumOverValidLabels) {
  const auto h = normal({7, 3}, 1), w = normal({5, 3}, 2);
  EXPECT_NEAR(ops::linear_cross_entropy(h, w, kLabels).item<double>(), by_hand(h, w, kLabels),
              1e-13);
}

TEST(CrossEntropy, LargeLogits) {
  const auto h = normal({7, 3}, 1, 1000.0), w = normal({5, 3}, 2);
  const double expected = by_hand(h, w, kLabels);
  EXPECT_NEAR(ops::linear_cross_entropy(h, w, kLabels).item<double>(), expected, 1e-12 * expected);
}

TEST(CrossEntropy, Gradients) {
  EXPECT_LT(gradient_error(kLoss, {normal({7, 3}, 1), normal({5, 3}, 2)}), 1e-8);
}

// bf16: logits are rounded to bf16 once, then all is fp32; the gradient of the logits likewise.
TEST(CrossEntropy, Precision) {
  EXPECT_LT(precision_error(kLoss, {normal({7, 64}, 1), normal({31, 64}, 2, 0.2)}, at::kFloat),
            1e-6);
  EXPECT_LT(precision_error(kLoss, {normal({7, 64}, 1), normal({31, 64}, 2, 0.2)}, at::kBFloat16),
            2e-2);
}

TEST(CrossEntropy, AllLabelsIgnoredIsZeroWithZeroGradients) {
  const Function f = [](const Inputs& x) {
    return ops::linear_cross_entropy(x[0], x[1], at::full({7}, -100, at::kLong));
  };
  const auto result = evaluate(f, {normal({7, 3}, 1), normal({5, 3}, 2)});
  EXPECT_EQ(result.value.item<double>(), 0.0);
  for (const auto& gradient : result.gradients) {
    EXPECT_EQ(gradient.abs().max().item<double>(), 0.0);
  }
}

// Two ranks of 8 labels, 5 and 1 of them valid: the sums add up, whatever the split.
TEST(CrossEntropy, SumsOfPartsDividedOnceEqualTheWhole) {
  const auto h = at::remainder(at::arange(48, at::kDouble), 5).view({16, 3}) - 2;
  const auto w = at::remainder(at::arange(12, at::kDouble), 7).view({4, 3}) - 3;
  auto labels = at::full({16}, -100, at::kLong);
  for (const int64_t t : {0, 1, 3, 4, 7, 12}) labels[t] = t % 4;
  const auto gradient = [&](const std::vector<std::pair<int64_t, int64_t>>& parts) {
    at::Tensor leaf = w.clone().set_requires_grad(true);
    for (const auto& [begin, length] : parts) {
      const auto loss = ops::linear_cross_entropy(h.narrow(0, begin, length), leaf,
                                                  labels.narrow(0, begin, length));
      torch::autograd::backward({loss / 6.0}, {});
    }
    return leaf.grad();
  };
  const auto whole = gradient({{0, 16}});
  EXPECT_LT((gradient({{0, 8}, {8, 8}}) - whole).abs().max().item<double>(), 1e-14);
  EXPECT_LT((gradient({{0, 4}, {4, 4}, {8, 4}, {12, 4}}) - whole).abs().max().item<double>(),
            1e-14);
}

TEST(CrossEntropy, BadInput) {
  const auto call = [](at::IntArrayRef hidden, at::IntArrayRef weight, const at::Tensor& labels) {
    return message_of(
        [&] { ops::linear_cross_entropy(at::zeros(hidden), at::zeros(weight), labels); });
  };
  EXPECT_THAT(call({6, 3}, {5, 3}, kLabels), ::testing::HasSubstr("expected [7 x 3], got [6 x 3]"));
  EXPECT_THAT(call({7, 4}, {5, 3}, kLabels), ::testing::HasSubstr("expected [7 x 3], got [7 x 4]"));
  EXPECT_THAT(
      call({7, 3}, {5, 3}, kLabels + 4),
      ::testing::HasSubstr("linear_cross_entropy: a label is out of bounds: expected -100 or "
                           "0 to 4 (V - 1), got 6 in row 0"));
  EXPECT_THAT(call({7, 3}, {5, 3}, kLabels.to(at::kInt)),
              ::testing::HasSubstr("labels: expected Long, got Int"));
}

}  // namespace
}  // namespace longhaul::testing
