#include "longhaul/ops/flash_attention/flash_attention.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "longhaul/ops/common.h"
#include "tests/ops/attention_loops.h"
#include "tests/support/gradcheck.h"

namespace longhaul::testing {
namespace {

using ::testing::HasSubstr;

constexpr double kScale = 0.37;
constexpr ops::AttentionOptions kAll{
    .scale = kScale, .return_head_sum = true, .return_statistics = true};

struct Case {
  const char* name;
  std::vector<std::vector<int64_t>> documents;
  int64_t H, D, V;
};

const Case kCases[] = {
    {"one slot", {{1}}, 1, 3, 2},
    {"one head", {{9}}, 1, 5, 3},
    {"odd sizes", {{13}, {13}}, 3, 7, 5},
    {"documents of length 1", {{1, 1, 4, 1}}, 2, 4, 4},
    {"packed and padded", {{5, 4, -2}, {-3, 8, 0}}, 2, 4, 3},
    {"only padding", {{-4}}, 2, 4, 3},
    {"more than one block of queries", {{150, 120}, {270}}, 2, 4, 3},
};

// q, key, value; the keys shared by all heads, or one for each.
Inputs operands(const Case& c, bool shared) {
  const auto starts = doc_start(c.documents);
  const int64_t B = starts.size(0), S = starts.size(1);
  if (shared) return {normal({B, S, c.H, c.D}, 1), normal({B, S, c.D}, 2), normal({B, S, c.V}, 3)};
  return {normal({B, S, c.H, c.D}, 1), normal({B, S, c.H, c.D}, 2), normal({B, S, c.H, c.V}, 3)};
}

Function attention(const at::Tensor& starts) {
  return [starts](const Inputs& x) {
    return ops::flash_attention(x[0], x[1], x[2], starts, {.scale = kScale}).out_BSHV;
  };
}

double distance(const at::Tensor& a, const at::Tensor& b) {
  return (a - b).abs().max().item<double>();
}

TEST(FlashAttention, EqualsLoops) {
  for (const auto& c : kCases) {
    for (const bool shared : {true, false}) {
      const auto starts = doc_start(c.documents);
      const auto x = operands(c, shared);
      const auto result = ops::flash_attention(x[0], x[1], x[2], starts, kAll);
      const auto expected = attention_in_loops(x[0], x[1], x[2], ops::visible_mask(starts), kScale);
      EXPECT_LT(distance(result.out_BSHV, expected.out_BSHV), 1e-13) << c.name << shared;
      EXPECT_LT(distance(result.softmax_max, expected.max_BSH), 1e-13) << c.name << shared;
      EXPECT_LT(distance(result.softmax_sum, expected.sum_BSH), 1e-12) << c.name << shared;
      EXPECT_LT(distance(result.head_sum, expected.head_sum_BSS), 1e-13) << c.name << shared;
    }
  }
}

TEST(FlashAttention, Gradients) {
  for (const auto& c : kCases) {
    for (const bool shared : {true, false}) {
      EXPECT_LT(gradient_error(attention(doc_start(c.documents)), operands(c, shared), 25), 1e-7)
          << c.name << shared;
    }
  }
}

// out is rounded once; gradients come from fp32 probabilities and are rounded once.
TEST(FlashAttention, Precision) {
  const Case c{"", {{33, 32}}, 4, 24, 16};
  for (const bool shared : {true, false}) {
    const auto f = attention(doc_start(c.documents));
    EXPECT_LT(precision_error(f, operands(c, shared), at::kFloat), 2e-6);
    EXPECT_LT(precision_error(f, operands(c, shared), at::kBFloat16), 4e-3);
  }
}

TEST(FlashAttention, LargeLogits) {
  const Case c{"", {{13}}, 2, 8, 4};
  auto x = operands(c, true);
  x[0] = x[0] * 1000;
  const auto starts = doc_start(c.documents);
  const auto expected = attention_in_loops(x[0], x[1], x[2], ops::visible_mask(starts), kScale);
  EXPECT_LT(distance(attention(starts)(x), expected.out_BSHV), 1e-11);
  for (auto& tensor : x) tensor = tensor.to(at::kFloat);
  const auto result = evaluate(attention(starts), x);
  EXPECT_TRUE(result.value.isfinite().all().item<bool>());
  for (const auto& gradient : result.gradients) {
    EXPECT_TRUE(gradient.isfinite().all().item<bool>());
  }
}

TEST(FlashAttention, PaddingGivesZeroAndGetsNoGradient) {
  const Case c{"", {{4, -3}}, 2, 4, 3};
  const auto result = evaluate(attention(doc_start(c.documents)), operands(c, true));
  EXPECT_EQ(result.value.narrow(1, 4, 3).abs().max().item<double>(), 0.0);
  for (const auto& gradient : result.gradients) {
    EXPECT_EQ(gradient.narrow(1, 4, 3).abs().max().item<double>(), 0.0);
    EXPECT_GT(gradient.narrow(1, 0, 4).abs().max().item<double>(), 0.0);
  }
}

TEST(FlashAttention, HeadSumIsDetached) {
  const Case c{"", {{5}}, 2, 4, 3};
  auto x = operands(c, true);
  x[0].set_requires_grad(true);
  const auto result = ops::flash_attention(x[0], x[1], x[2], doc_start(c.documents), kAll);
  EXPECT_FALSE(result.head_sum.requires_grad());
  EXPECT_TRUE(result.out_BSHV.requires_grad());
}

TEST(FlashAttention, BadInput) {
  const auto call = [](at::IntArrayRef q, at::IntArrayRef k, at::IntArrayRef v,
                       at::IntArrayRef starts) {
    return message_of([&] {
      ops::flash_attention(at::zeros(q), at::zeros(k), at::zeros(v), at::zeros(starts, at::kLong),
                           {});
    });
  };
  EXPECT_THAT(call({2, 5, 3}, {2, 5, 4}, {2, 5, 3}, {2, 5}),
              HasSubstr("attention query: expected 4 dimensions, got [2 x 5 x 3]"));
  EXPECT_THAT(call({2, 5, 3, 4}, {2, 5, 6}, {2, 5, 3}, {2, 5}),
              HasSubstr("attention key: expected [2 x any x 4], got [2 x 5 x 6]"));
  EXPECT_THAT(call({2, 5, 3, 4}, {2, 5, 2, 4}, {2, 5, 2, 3}, {2, 5}),
              HasSubstr("attention key: expected [2 x any x 3 x 4], got [2 x 5 x 2 x 4]"));
  EXPECT_THAT(call({2, 5, 3, 4}, {2, 5, 4}, {2, 4, 3}, {2, 5}),
              HasSubstr("attention value: expected [2 x 5 x any], got [2 x 4 x 3]"));
  EXPECT_THAT(call({2, 5, 3, 4}, {2, 5, 3, 4}, {2, 5, 3}, {2, 5}),
              HasSubstr("attention value: expected [2 x 5 x 3 x any], got [2 x 5 x 3]"));
  EXPECT_THAT(call({2, 5, 3, 4}, {2, 5, 4}, {2, 5, 3}, {2, 6}),
              HasSubstr("attention doc_start: expected [2 x 5], got [2 x 6]"));
}

}  // namespace
}  // namespace longhaul::testing
