#include "longhaul/ops/moe_gating_top_k/moe_gating_top_k.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "tests/support/gradcheck.h"

namespace longhaul::testing {
namespace {

using ops::GatingOptions;
using ::testing::HasSubstr;

// Indices of the k largest of `values` among `allowed`, one after the other, the lowest index first
// among equals.
std::vector<int64_t> largest(const std::vector<double>& values, int64_t k,
                             const std::set<int64_t>& allowed) {
  std::vector<int64_t> found;
  while (static_cast<int64_t>(found.size()) < k) {
    int64_t best = -1;
    for (const int64_t i : allowed) {
      if (std::count(found.begin(), found.end(), i) > 0) continue;
      if (best < 0 || values[i] > values[best]) best = i;
    }
    found.push_back(best);
  }
  return found;
}

std::set<int64_t> range(int64_t begin, int64_t end) {
  std::set<int64_t> all;
  for (int64_t i = begin; i < end; ++i) all.insert(i);
  return all;
}

std::vector<int64_t> choose_by_hand(const std::vector<double>& biased, const GatingOptions& o) {
  const auto E = static_cast<int64_t>(biased.size());
  const int64_t size = E / o.n_group;
  std::vector<double> group_scores;
  for (int64_t g = 0; g < o.n_group; ++g) {
    double sum = 0;
    for (const int64_t e :
         largest(biased, std::min<int64_t>(2, size), range(g * size, (g + 1) * size))) {
      sum += biased[e];
    }
    group_scores.push_back(sum);
  }
  std::set<int64_t> allowed;
  for (const int64_t g : largest(group_scores, o.topk_group, range(0, o.n_group))) {
    for (int64_t e = g * size; e < (g + 1) * size; ++e) allowed.insert(e);
  }
  return largest(biased, o.k, allowed);
}

std::vector<double> row(const at::Tensor& x) {
  const auto c = x.to(at::kDouble).contiguous();
  return {c.data_ptr<double>(), c.data_ptr<double>() + c.numel()};
}

std::vector<int64_t> ids(const at::Tensor& x) {
  return {x.data_ptr<int64_t>(), x.data_ptr<int64_t>() + x.numel()};
}

struct Case {
  int64_t E;
  GatingOptions options;
};

const Case kCases[] = {
    {8, {.k = 2, .n_group = 4, .topk_group = 2}},
    {12, {.k = 3, .n_group = 4, .topk_group = 1}},
    {7, {.k = 3}},
    {4, {.k = 1, .n_group = 4, .topk_group = 1}},
    {8, {.k = 8}},
    {1, {.k = 1}},
};

TEST(ChooseExperts, EqualsTheRuleWrittenOut) {
  for (const auto& [E, options] : kCases) {
    const auto scores = at::sigmoid(normal({40, E}, 1)), bias = normal({E}, 2, 0.3);
    const auto chosen = ops::choose_experts(scores, bias, options);
    for (int64_t t = 0; t < 40; ++t) {
      EXPECT_EQ(ids(chosen[t]), choose_by_hand(row(scores[t] + bias), options)) << E << " " << t;
    }
  }
}

// Scores of few values: ties within and between groups in nearly every row.
TEST(ChooseExperts, TiesGoToTheLowestExpertAndGroup) {
  for (const auto& [E, options] : kCases) {
    for (const auto dtype : {at::kFloat, at::kDouble}) {
      const auto scores = (integers({60, E}, 3, 3).to(dtype) + 1) / 4;
      const auto chosen = ops::choose_experts(scores, {}, options);
      for (int64_t t = 0; t < 60; ++t) {
        EXPECT_EQ(ids(chosen[t]), choose_by_hand(row(scores[t]), options)) << E << " " << t;
      }
    }
  }
  // All equal, and more experts than a sort handles in one small block.
  const auto chosen =
      ops::choose_experts(at::full({3, 256}, 0.5), {}, {.k = 8, .n_group = 8, .topk_group = 4});
  EXPECT_EQ(ids(chosen[2]), (std::vector<int64_t>{0, 1, 2, 3, 4, 5, 6, 7}));
}

TEST(ChooseExperts, ANegativeBiasDoesNotLetOtherGroupsIn) {
  // Group 0 is best by its two largest; its third expert is far below those of group 1.
  const auto scores = at::tensor({0.9, 0.8, 0.1, 0.5, 0.5, 0.5}, at::kDouble).view({1, 6});
  const auto bias = at::tensor({0.0, 0.0, -5.0, 0.0, 0.0, 0.0}, at::kDouble);
  const auto chosen = ops::choose_experts(scores, bias, {.k = 3, .n_group = 2, .topk_group = 1});
  EXPECT_EQ(ids(chosen), (std::vector<int64_t>{0, 1, 2}));
}

TEST(GatingScores, SigmoidAndSoftmax) {
  const auto logits = normal({3, 5}, 1, 4.0);
  const auto sigmoid = ops::gating_scores(logits, {}),
             softmax = ops::gating_scores(logits, {.softmax = true});
  for (int64_t t = 0; t < 3; ++t) {
    double sum = 0;
    for (const double x : row(logits[t])) sum += std::exp(x);
    for (int64_t e = 0; e < 5; ++e) {
      const double x = logits[t][e].item<double>();
      EXPECT_NEAR(sigmoid[t][e].item<double>(), 1 / (1 + std::exp(-x)), 1e-15);
      EXPECT_NEAR(softmax[t][e].item<double>(), std::exp(x) / sum, 1e-14);
    }
  }
  EXPECT_EQ(ops::gating_scores(logits.to(at::kBFloat16), {}).scalar_type(), at::kFloat);
}

TEST(GatingScores, LargeLogitsStayFinite) {
  const auto logits = at::tensor({-1e4, 1e4, 0.0}, at::kFloat).view({1, 3});
  for (const bool softmax : {false, true}) {
    const GatingOptions options{.k = 2, .softmax = softmax};
    const auto scores = ops::gating_scores(logits, options);
    const auto weights =
        ops::gate_weights(scores, ops::choose_experts(scores, {}, options), options);
    EXPECT_TRUE(weights.isfinite().all().item<bool>());
  }
}

TEST(GateWeights, NormalisedAndScaled) {
  const auto scores = at::tensor({0.2, 0.6, 0.4, 0.1}, at::kDouble).view({1, 4});
  const auto experts = at::tensor({1, 0}, at::kLong).view({1, 2});
  const auto weights = ops::gate_weights(scores, experts, {.k = 2, .scale = 2.5});
  EXPECT_NEAR(weights[0][0].item<double>(), 2.5 * 0.75, 1e-15);
  EXPECT_NEAR(weights[0][1].item<double>(), 2.5 * 0.25, 1e-15);
  const auto raw = ops::gate_weights(scores, experts, {.k = 2, .normalize = false, .scale = 2.5});
  EXPECT_NEAR(raw[0][0].item<double>(), 1.5, 1e-15);
}

TEST(GateWeights, ScoresOfZeroGiveZeroNotNan) {
  const auto weights = ops::gate_weights(at::zeros({1, 4}), at::zeros({1, 2}, at::kLong), {.k = 2});
  EXPECT_EQ(weights.abs().max().item<double>(), 0.0);
}

TEST(GateWeights, Gradients) {
  for (const bool softmax : {false, true}) {
    for (const bool normalize : {false, true}) {
      const GatingOptions options{.k = 3,
                                  .n_group = 2,
                                  .topk_group = 1,
                                  .softmax = softmax,
                                  .normalize = normalize,
                                  .scale = 2.5};
      const auto logits = normal({6, 8}, 1);
      const auto experts = ops::choose_experts(ops::gating_scores(logits, options), {}, options);
      const Function f = [&](const Inputs& x) {
        return ops::gate_weights(ops::gating_scores(x[0], options), experts, options);
      };
      EXPECT_LT(gradient_error(f, {logits}), 1e-8);
    }
  }
}

TEST(ChooseExperts, NansDoNotThrowAndStayInRange) {
  at::Tensor scores = at::sigmoid(normal({4, 8}, 1));
  scores[1].fill_(NAN);
  scores[2][3] = NAN;
  const auto chosen = ops::choose_experts(scores, {}, {.k = 2, .n_group = 4, .topk_group = 2});
  EXPECT_TRUE((chosen >= 0).logical_and(chosen < 8).all().item<bool>());
}

TEST(ChooseExperts, BadInput) {
  const auto call = [](at::IntArrayRef scores, const at::Tensor& bias, const GatingOptions& o) {
    return message_of([&] { ops::choose_experts(at::zeros(scores), bias, o); });
  };
  EXPECT_THAT(call({3, 8}, {}, {.k = 9}), HasSubstr("k: expected 1 to 8 experts, got 9"));
  EXPECT_THAT(call({3, 8}, {}, {.k = 0}), HasSubstr("k: expected 1 to 8 experts, got 0"));
  EXPECT_THAT(call({3, 8}, {}, {.k = 1, .n_group = 3}),
              HasSubstr("expected a multiple of 3, got 8"));
  EXPECT_THAT(call({3, 8}, {}, {.k = 1, .n_group = 2, .topk_group = 3}),
              HasSubstr("topk_group: expected 1 to 2 groups, got 3"));
  EXPECT_THAT(call({3, 8}, at::zeros({7}), {}), HasSubstr("bias: expected [8], got [7]"));
  EXPECT_THAT(call({24}, {}, {}), HasSubstr("expected 2 dimensions, got [24]"));
}

}  // namespace
}  // namespace longhaul::testing
