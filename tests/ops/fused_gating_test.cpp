// The fused router against the reference, for the instruction set that LONGHAUL_ISA names (ctest
// runs this once for each).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "longhaul/ops/moe_gating_top_k/moe_gating_top_k.h"
#include "tests/ops/fused_operator.h"

namespace longhaul::testing {
namespace {

using ops::GatingOptions;
using ops::Kernel;
using ::testing::HasSubstr;

struct Case {
  int64_t T, E;
  GatingOptions options;
};

std::vector<Case> cases() {
  return {
      {1, 1, {.k = 1}},
      {5, 7, {.k = 3, .scale = 2.5}},
      {33, 16, {.k = 16}},
      {9, 17, {.k = 2, .normalize = false, .scale = 0.5}},
      {64, 256, {.k = 8, .n_group = 8, .topk_group = 4, .scale = 2.5}},
      {40, 24, {.k = 4, .n_group = 4, .topk_group = 2}},
      {40, 12, {.k = 3, .n_group = 12, .topk_group = 5}},   // groups of one
      {20, 12, {.k = 5, .n_group = 4, .topk_group = 1}},    // more than a group has
      {20, 72, {.k = 6, .n_group = 18, .topk_group = 17}},  // groups beyond a vector
      {11, 64, {.k = 6, .softmax = true, .normalize = false}},
      {11, 65, {.k = 6, .n_group = 5, .topk_group = 3, .softmax = true}},
      {0, 8, {.k = 2}},
      {3000, 33, {.k = 5, .scale = 2.0}},
  };
}

std::string name_of(const Case& c) {
  return std::to_string(c.T) + " x " + std::to_string(c.E) + ", k " + std::to_string(c.options.k) +
         (c.options.softmax ? ", softmax" : "");
}

// Weights and scores side by side, so that both have a gradient.
at::Tensor both(const ops::Gating& gating) {
  return at::cat({gating.weights_TK, gating.scores_TE}, -1);
}

class FusedGating : public FusedOperator {
  at::ScalarType value_dtype() const override { return at::kFloat; }
};

// Against the definition in fp64, for the kernel's own choice: scores that are closer than fp32
// tells may be chosen the other way.
TEST_P(FusedGating, EqualsReference) {
  for (const auto& c : cases()) {
    const auto logits = normal({c.T, c.E}, 1, 2.0, GetParam());
    const auto bias = normal({c.E}, 2, 0.3, at::kFloat);
    const auto own = ops::moe_gating_top_k(logits, bias, c.options, {}, Kernel::kFused);
    EXPECT_TRUE(at::equal(own.experts_TK, ops::choose_experts(own.scores_TE, bias, c.options)))
        << name_of(c);
    const Operator f = [&](const Inputs& x, Kernel kernel) {
      const auto chosen = kernel == Kernel::kReference ? own.experts_TK : at::Tensor();
      return both(ops::moe_gating_top_k(x[0], bias, c.options, chosen, kernel));
    };
    expect_as_reference(f, {logits}, name_of(c));
    const Operator only_weights = [&](const Inputs& x, Kernel kernel) {
      return ops::moe_gating_top_k(x[0], bias, c.options, own.experts_TK, kernel).weights_TK;
    };
    if (c.options.k < c.E) expect_as_reference(only_weights, {logits}, name_of(c) + ", weights");
  }
}

// Few different numbers: ties among experts and among groups, also of -0 and 0 and of negative
// ones.
TEST_P(FusedGating, TiesGoToTheLowest) {
  for (const auto& c : cases()) {
    const auto logits = integers({c.T, c.E}, 3, 1).to(at::kFloat) - 1;
    for (const double unit : {0.0, 1.0, -2.0}) {
      const auto bias = integers({c.E}, 2, 2).to(at::kFloat) * unit;
      const auto own = ops::moe_gating_top_k(logits, bias, c.options, {}, Kernel::kFused);
      EXPECT_TRUE(at::equal(own.experts_TK, ops::choose_experts(own.scores_TE, bias, c.options)))
          << name_of(c) << ", bias " << unit;
    }
  }
  const auto zeros =
      ops::moe_gating_top_k(at::full({1, 40}, -1e4F), at::tensor({0.0F, -0.0F}).repeat({20}),
                            {.k = 4}, {}, Kernel::kFused);
  EXPECT_TRUE(at::equal(zeros.experts_TK, at::arange(4).view({1, 4})));
}

TEST_P(FusedGating, ExtremeLogits) {
  const auto logits =
      at::tensor({-1e4F, 1e4F, 0.0F, -90.0F, 90.0F, -20.0F, 17.0F, 1e-30F}).view({1, 8});
  for (const bool softmax : {false, true}) {
    const GatingOptions options = {.k = 3, .softmax = softmax};
    const auto gating = ops::moe_gating_top_k(logits, {}, options, {}, Kernel::kFused);
    const auto expected =
        ops::moe_gating_top_k(logits.to(at::kDouble), {}, options, gating.experts_TK);
    EXPECT_LT(error(gating.weights_TK, expected.weights_TK), limit());
    EXPECT_LT(error(gating.scores_TE, expected.scores_TE), limit());
  }
  // All chosen scores vanish: 1e-20 keeps the weights finite.
  const auto none = evaluate(
      [](const Inputs& x) {
        return ops::moe_gating_top_k(x[0], {}, {.k = 2}, {}, Kernel::kFused).weights_TK;
      },
      {at::full({2, 5}, -200.0F)});
  EXPECT_EQ(none.value.abs().max().item<double>(), 0.0);
  EXPECT_EQ(none.gradients[0].abs().max().item<double>(), 0.0);
}

// As at::sort: what is not a number is the largest. It reaches the weights, so that a loss shows
// it.
TEST_P(FusedGating, NotFinite) {
  auto logits = normal({4, 20}, 1, 1, at::kFloat);
  logits[1][13] = NAN;
  logits[2][7] = INFINITY;
  logits[3][5] = -INFINITY;
  for (const int64_t groups : {1, 4}) {
    const GatingOptions options = {.k = 3, .n_group = groups, .topk_group = groups > 1 ? 2 : 1};
    const auto own = ops::moe_gating_top_k(logits, {}, options, {}, Kernel::kFused);
    EXPECT_TRUE(at::equal(own.experts_TK, ops::choose_experts(own.scores_TE, {}, options)))
        << groups;
    EXPECT_TRUE(own.weights_TK[1].isnan().all().item<bool>());
    EXPECT_TRUE(own.weights_TK[2].isfinite().all().item<bool>());
  }
}

// An earlier choice is repeated, also one with an expert twice.
TEST_P(FusedGating, GivenChoice) {
  const auto chosen = at::tensor({0, 4, 4, 2, 1, 0}, at::kLong).view({3, 2});
  for (const bool softmax : {false, true}) {
    const Operator f = [&](const Inputs& x, Kernel kernel) {
      const auto gating =
          ops::moe_gating_top_k(x[0], {}, {.k = 2, .softmax = softmax}, chosen, kernel);
      EXPECT_TRUE(at::equal(gating.experts_TK, chosen));
      EXPECT_FALSE(gating.experts_TK.requires_grad());
      return both(gating);
    };
    expect_as_reference(f, {normal({3, 5}, 1)}, "given");
  }
}

TEST_P(FusedGating, ThreadsDoNotChangeABit) {
  for (const bool softmax : {false, true}) {
    const Operator f = [&](const Inputs& x, Kernel kernel) {
      return both(ops::moe_gating_top_k(
          x[0], {}, {.k = 6, .n_group = 6, .topk_group = 3, .softmax = softmax}, {}, kernel));
    };
    expect_same_on_any_threads(f, {normal({1500, 66}, 1, 1, at::kFloat)});
  }
}

TEST_P(FusedGating, MetaTensorsHaveTheSizes) {
  const Operator f = [](const Inputs& x, Kernel kernel) {
    return both(ops::moe_gating_top_k(x[0], {}, {.k = 3}, {}, kernel));
  };
  expect_meta_sizes(f, {normal({6, 14}, 1, 1, at::kFloat)});
}

TEST_P(FusedGating, OtherDtypesTakeTheReference) {
  const auto logits = normal({6, 14}, 1);
  const GatingOptions options = {.k = 3};
  EXPECT_TRUE(at::equal(both(ops::moe_gating_top_k(logits, {}, options, {}, Kernel::kFused)),
                        both(ops::moe_gating_top_k(logits, {}, options))));
}

TEST_P(FusedGating, BadInput) {
  const auto call = [](const GatingOptions& options, int64_t bias, const at::Tensor& chosen = {}) {
    return message_of([&] {
      ops::moe_gating_top_k(at::zeros({4, 6}), at::zeros({bias}), options, chosen, Kernel::kFused);
    });
  };
  EXPECT_THAT(call({.k = 7}, 6), HasSubstr("k: expected 1 to 6 experts, got 7"));
  EXPECT_THAT(call({.k = 1, .n_group = 2, .topk_group = 3}, 6),
              HasSubstr("topk_group: expected 1 to 2 groups, got 3"));
  EXPECT_THAT(call({.k = 1, .n_group = 4, .topk_group = 1}, 6),
              HasSubstr("experts in n_group groups: expected a multiple of 4, got 6"));
  EXPECT_THAT(call({.k = 1}, 5), HasSubstr("router bias: expected [6], got [5]"));
  EXPECT_THAT(call({.k = 1}, 6, at::zeros({4, 2}, at::kLong)),
              HasSubstr("chosen experts: expected [4 x 1], got [4 x 2]"));
  EXPECT_THAT(call({.k = 1}, 6, at::full({4, 1}, 6, at::kLong)),
              HasSubstr("experts: expected 0 to 5 (E - 1), got 6 for token 0"));
}

INSTANTIATE_TEST_SUITE_P(Dtypes, FusedGating, ::testing::Values(at::kFloat, at::kBFloat16));

}  // namespace
}  // namespace longhaul::testing
