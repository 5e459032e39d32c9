#include "longhaul/ops/moe_token_permute/moe_token_permute.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/gradcheck.h"

namespace longhaul::testing {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kExperts = 4;

struct Choice {
  const char* name;
  at::Tensor experts_TK;
};

std::vector<Choice> choices() {
  return {
      {"random", integers({9, 2}, kExperts, 1)},
      {"some nowhere", integers({9, 2}, kExperts + 1, 2)},
      {"all to one", at::full({9, 2}, 2, at::kLong)},
      {"all nowhere", at::full({9, 2}, kExperts, at::kLong)},
      {"one token, one choice", at::full({1, 1}, 3, at::kLong)},
      {"not contiguous", integers({2, 9}, kExperts, 3).t()},
  };
}

// Flat choices expert by expert, tokens in order within each; nowhere last.
std::vector<int64_t> order_by_hand(const at::Tensor& experts_TK) {
  const auto flat = experts_TK.reshape(-1);
  std::vector<int64_t> order;
  for (int64_t e = 0; e <= kExperts; ++e) {
    for (int64_t i = 0; i < flat.numel(); ++i) {
      if (flat[i].item<int64_t>() == e) order.push_back(i);
    }
  }
  return order;
}

TEST(SortByExpert, OrderInverseAndCounts) {
  for (const auto& [name, experts] : choices()) {
    const auto sorted = ops::sort_by_expert(experts, kExperts);
    const auto expected = order_by_hand(experts);
    ASSERT_TRUE(at::equal(sorted.order, at::tensor(expected, at::kLong))) << name;
    for (size_t row = 0; row < expected.size(); ++row) {
      EXPECT_EQ(sorted.inverse.view(-1)[expected[row]].item<int64_t>(), static_cast<int64_t>(row))
          << name;
    }
    ASSERT_EQ(sorted.counts_E.numel(), kExperts);
    for (int64_t e = 0; e < kExperts; ++e) {
      EXPECT_EQ(sorted.counts_E[e].item<int64_t>(), experts.eq(e).sum().item<int64_t>()) << name;
    }
  }
}

TEST(SortByExpert, OfNoTokens) {
  const auto sorted = ops::sort_by_expert(at::empty({0, 2}, at::kLong), kExperts);
  EXPECT_EQ(sorted.order.numel(), 0);
  EXPECT_EQ(sorted.inverse.sizes(), at::IntArrayRef({0, 2}));
  EXPECT_TRUE(at::equal(sorted.counts_E, at::zeros({kExperts}, at::kLong)));
}

TEST(Permute, BringsTokensToTheirRows) {
  for (const auto& [name, experts] : choices()) {
    const int64_t T = experts.size(0), k = experts.size(1);
    const auto x = normal({T, 3}, 5);
    const auto rows = ops::moe_token_permute(x, ops::sort_by_expert(experts, kExperts));
    const auto order = order_by_hand(experts);
    for (size_t row = 0; row < order.size(); ++row) {
      EXPECT_TRUE(at::equal(rows[static_cast<int64_t>(row)], x[order[row] / k])) << name;
    }
  }
}

TEST(Unpermute, IsTheWeighedSum) {
  for (const auto& [name, experts] : choices()) {
    const int64_t T = experts.size(0), k = experts.size(1);
    const auto order = order_by_hand(experts);
    const auto rows = normal({T * k, 3}, 5), probs = normal({T, k}, 6);
    at::Tensor expected = at::zeros({T, 3}, at::kDouble);
    for (size_t row = 0; row < order.size(); ++row) {
      const int64_t t = order[row] / k, i = order[row] % k;
      expected[t] += probs[t][i] * rows[static_cast<int64_t>(row)];
    }
    const auto out = ops::moe_token_unpermute(rows, probs, ops::sort_by_expert(experts, kExperts));
    EXPECT_LT((out - expected).abs().max().item<double>(), 1e-14) << name;
  }
}

TEST(PermuteAndUnpermute, Gradients) {
  for (const auto& [name, experts] : choices()) {
    const int64_t T = experts.size(0), k = experts.size(1);
    const auto order = ops::sort_by_expert(experts, kExperts);
    const Function permute = [&](const Inputs& x) { return ops::moe_token_permute(x[0], order); };
    EXPECT_LT(gradient_error(permute, {normal({T, 3}, 1)}), 1e-8) << name;
    const Function unpermute = [&](const Inputs& x) {
      return ops::moe_token_unpermute(x[0], x[1], order);
    };
    EXPECT_LT(gradient_error(unpermute, {normal({T * k, 3}, 1), normal({T, k}, 2)}), 1e-8) << name;
  }
}

// bf16: one rounding of each result; the sums are fp32.
TEST(PermuteAndUnpermute, Precision) {
  const auto experts = integers({33, 6}, kExperts, 1);
  const auto order = ops::sort_by_expert(experts, kExperts);
  const Function f = [&](const Inputs& x) {
    return ops::moe_token_unpermute(ops::moe_token_permute(x[0], order), x[1], order);
  };
  EXPECT_LT(precision_error(f, {normal({33, 17}, 1), normal({33, 6}, 2)}, at::kFloat), 5e-7);
  EXPECT_LT(precision_error(f, {normal({33, 17}, 1), normal({33, 6}, 2)}, at::kBFloat16), 6e-3);
}

TEST(PermuteAndUnpermute, RoundTripWithProbabilitiesThatAddUpToOne) {
  const auto experts = integers({9, 3}, kExperts, 1);
  const auto order = ops::sort_by_expert(experts, kExperts);
  const auto x = normal({9, 4}, 2), probs = at::softmax(normal({9, 3}, 3), -1);
  const auto back = ops::moe_token_unpermute(ops::moe_token_permute(x, order), probs, order);
  EXPECT_LT((back - x).abs().max().item<double>(), 1e-14);
}

TEST(PermuteAndUnpermute, BadInput) {
  const auto order = ops::sort_by_expert(integers({9, 2}, kExperts, 1), kExperts);
  EXPECT_THAT(message_of([&] {
                ops::moe_token_permute(at::zeros({8, 3}), order);
              }),
              HasSubstr("tokens: expected [9 x any], got [8 x 3]"));
  EXPECT_THAT(message_of([&] {
                ops::moe_token_unpermute(at::zeros({18, 3}), at::zeros({9, 1}), order);
              }),
              HasSubstr("probs: expected [9 x 2], got [9 x 1]"));
  EXPECT_THAT(message_of([&] {
                ops::moe_token_unpermute(at::zeros({17, 3}), at::zeros({9, 2}), order);
              }),
              HasSubstr("rows: expected [18 x any], got [17 x 3]"));
  for (const int64_t expert : {int64_t{9}, int64_t{-1}}) {
    EXPECT_THAT(
        message_of([&] {
          ops::sort_by_expert(at::full({2, 2}, expert, at::kLong), kExperts);
        }),
        HasSubstr(fmt::format("chosen experts: expected 0 to {}, got {}", kExperts, expert)));
  }
  for (const at::Device device : {at::kCPU, at::kMeta}) {
    const auto experts = at::zeros({2, 2}, at::TensorOptions(at::kInt).device(device));
    EXPECT_THAT(message_of([&] { ops::sort_by_expert(experts, kExperts); }),
                HasSubstr("chosen experts: expected int64, got Int"));
  }
}

}  // namespace
}  // namespace longhaul::testing
