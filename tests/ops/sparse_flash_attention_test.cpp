#include "longhaul/ops/sparse_flash_attention/sparse_flash_attention.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "longhaul/ops/common.h"
#include "longhaul/ops/lightning_indexer/lightning_indexer.h"
#include "tests/ops/attention_loops.h"
#include "tests/support/gradcheck.h"

namespace longhaul::testing {
namespace {

using ::testing::HasSubstr;

constexpr double kScale = 0.37;
constexpr ops::AttentionOptions kAll{
    .scale = kScale, .return_head_sum = true, .return_statistics = true};

// Distinct random visible keys, at most K a row, in random order and with -1 in between.
at::Tensor scattered_indices(const at::Tensor& starts, int64_t K, uint64_t seed) {
  const int64_t B = starts.size(0), S = starts.size(1);
  const auto kept = topk_in_loops(normal({B, S, S}, seed), ops::visible_mask(starts), K + 2);
  const auto shuffle = normal(kept.sizes(), seed + 1).argsort(int64_t{-1});
  return kept.gather(2, shuffle).contiguous();
}

at::Tensor mask_by_hand(const at::Tensor& indices, int64_t S) {
  at::Tensor mask = at::zeros({indices.size(0), indices.size(1), S}, at::kBool);
  const auto index = indices.accessor<int32_t, 3>();
  auto out = mask.accessor<bool, 3>();
  for (int64_t b = 0; b < index.size(0); ++b) {
    for (int64_t t = 0; t < index.size(1); ++t) {
      for (int64_t i = 0; i < index.size(2); ++i) {
        if (index[b][t][i] >= 0) out[b][t][index[b][t][i]] = true;
      }
    }
  }
  return mask;
}

struct Case {
  const char* name;
  std::vector<std::vector<int64_t>> documents;
  int64_t H, D, V, K;
};

const Case kCases[] = {
    {"one slot", {{1}}, 1, 3, 2, 4},
    {"one head, one key", {{9}}, 1, 5, 3, 1},
    {"odd sizes", {{13}, {13}}, 3, 7, 5, 4},
    {"K larger than S", {{6}}, 2, 4, 3, 11},
    {"documents of length 1", {{1, 1, 4, 1}}, 2, 4, 4, 2},
    {"packed and padded", {{5, 4, -2}, {-3, 8, 0}}, 2, 4, 3, 3},
    {"more than one block of queries", {{150, 120}, {270}}, 2, 4, 3, 9},
};

Inputs operands(const Case& c, bool shared) {
  const auto starts = doc_start(c.documents);
  const int64_t B = starts.size(0), S = starts.size(1);
  if (shared) return {normal({B, S, c.H, c.D}, 1), normal({B, S, c.D}, 2), normal({B, S, c.V}, 3)};
  return {normal({B, S, c.H, c.D}, 1), normal({B, S, c.H, c.D}, 2), normal({B, S, c.H, c.V}, 3)};
}

Function attention(const at::Tensor& indices, double scale = kScale) {
  return [indices, scale](const Inputs& x) {
    return ops::sparse_flash_attention(x[0], x[1], x[2], indices, {.scale = scale}).out_BSHV;
  };
}

double distance(const at::Tensor& a, const at::Tensor& b) {
  return (a - b).abs().max().item<double>();
}

TEST(SparseFlashAttention, EqualsLoopsOverTheSelectedKeys) {
  for (const auto& c : kCases) {
    for (const bool shared : {true, false}) {
      const auto starts = doc_start(c.documents);
      const auto x = operands(c, shared);
      const auto indices = scattered_indices(starts, c.K, 7);
      const auto result = ops::sparse_flash_attention(x[0], x[1], x[2], indices, kAll);
      const auto expected =
          attention_in_loops(x[0], x[1], x[2], mask_by_hand(indices, starts.size(1)), kScale);
      EXPECT_LT(distance(result.out_BSHV, expected.out_BSHV), 1e-13) << c.name << shared;
      EXPECT_LT(distance(result.softmax_max, expected.max_BSH), 1e-13) << c.name << shared;
      EXPECT_LT(distance(result.softmax_sum, expected.sum_BSH), 1e-12) << c.name << shared;
      const auto index = indices.to(at::kLong);
      const auto head_sum =
          expected.head_sum_BSS.gather(2, index.clamp_min(0)).masked_fill(index < 0, 0);
      EXPECT_LT(distance(result.head_sum, head_sum), 1e-13) << c.name << shared;
    }
  }
}

TEST(SparseFlashAttention, Gradients) {
  for (const auto& c : kCases) {
    for (const bool shared : {true, false}) {
      const auto indices = scattered_indices(doc_start(c.documents), c.K, 7);
      EXPECT_LT(gradient_error(attention(indices), operands(c, shared), 25), 1e-7)
          << c.name << shared;
    }
  }
}

TEST(SparseFlashAttention, Precision) {
  const Case c{"", {{33, 32}}, 4, 24, 16, 9};
  const auto indices = scattered_indices(doc_start(c.documents), c.K, 7);
  for (const bool shared : {true, false}) {
    EXPECT_LT(precision_error(attention(indices), operands(c, shared), at::kFloat), 2e-6);
    EXPECT_LT(precision_error(attention(indices), operands(c, shared), at::kBFloat16), 4e-3);
  }
}

TEST(SparseFlashAttention, AllVisibleKeysIsDenseAttention) {
  const auto starts = doc_start({{5, 4, -2}});
  const auto indices = ops::mask_to_indices(ops::visible_mask(starts), 11);
  const Inputs x = {normal({1, 11, 2, 4}, 1), normal({1, 11, 4}, 2), normal({1, 11, 3}, 3)};
  const auto dense = ops::flash_attention(x[0], x[1], x[2], starts, {.scale = kScale}).out_BSHV;
  EXPECT_TRUE(at::equal(attention(indices)(x), dense));
}

// S = 12, topk = 8, d = 16, 2 heads: row t has min(t + 1, 8) keys, row 5 has none. Logits as they
// are and times 100.
class EmptyRow : public ::testing::TestWithParam<double> {
 protected:
  static constexpr int64_t kS = 12, kTopk = 8;
  EmptyRow() {
    indices_ = at::full({1, kS, kTopk}, -1, at::kInt);
    for (int64_t t = 0; t < kS; ++t) {
      const int64_t n = std::min<int64_t>(t + 1, kTopk);
      if (t != 5) indices_[0][t].narrow(0, 0, n).copy_(at::arange(t + 1 - n, t + 1, at::kInt));
    }
    x_ = {normal({1, kS, 2, 16}, 7) * GetParam(), normal({1, kS, 2, 16}, 8),
          normal({1, kS, 2, 16}, 9)};
  }
  at::Tensor indices_;
  Inputs x_;
};

TEST_P(EmptyRow, IsZeroAndTheOthersEqualAttentionUnderADenseMask) {
  const auto result = evaluate(attention(indices_, 0.25), x_);
  EXPECT_EQ(result.value.select(1, 5).abs().max().item<double>(), 0.0);
  EXPECT_EQ(result.gradients[0].select(1, 5).abs().max().item<double>(), 0.0);
  EXPECT_TRUE(result.value.isfinite().all().item<bool>());
  for (const auto& gradient : result.gradients) {
    EXPECT_TRUE(gradient.isfinite().all().item<bool>());
  }
  const auto expected = attention_in_loops(x_[0], x_[1], x_[2], mask_by_hand(indices_, kS), 0.25);
  EXPECT_LT(distance(result.value, expected.out_BSHV), 1e-10);
  EXPECT_LT(gradient_error(attention(indices_, 0.25), x_, 40, 1e-6), 1e-5);
}

TEST_P(EmptyRow, StaysFiniteInFp32AndBf16) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    Inputs x;
    for (const auto& tensor : x_) x.push_back(tensor.to(dtype));
    const auto result = evaluate(attention(indices_, 0.25), x);
    EXPECT_EQ(result.value.select(1, 5).abs().max().item<double>(), 0.0);
    EXPECT_TRUE(result.value.isfinite().all().item<bool>());
    for (const auto& gradient : result.gradients) {
      EXPECT_TRUE(gradient.isfinite().all().item<bool>());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Logits, EmptyRow, ::testing::Values(1.0, 100.0));

TEST(SparseFlashAttention, BadInput) {
  const auto call = [](at::IntArrayRef q, at::IntArrayRef k, const at::Tensor& indices) {
    return message_of([&] {
      ops::sparse_flash_attention(at::zeros(q), at::zeros(k), at::zeros(k), indices, {});
    });
  };
  const auto none = [](at::IntArrayRef sizes) { return at::full(sizes, -1, at::kInt); };
  EXPECT_THAT(call({2, 5, 3, 4}, {2, 5, 4}, none({2, 4, 3})),
              HasSubstr("indices: expected [2 x 5 x any], got [2 x 4 x 3]"));
  EXPECT_THAT(call({2, 5, 3, 4}, {2, 5, 4}, none({5, 3})),
              HasSubstr("indices: expected [2 x 5 x any], got [5 x 3]"));
  EXPECT_THAT(call({2, 5, 3, 4}, {2, 5, 5}, none({2, 5, 3})),
              HasSubstr("key: expected [2 x any x 4], got [2 x 5 x 5]"));
  EXPECT_NE(call({2, 5, 3, 4}, {2, 5, 4}, at::full({2, 5, 3}, 5, at::kInt)), "") << "key 5 of 5";
  EXPECT_EQ(call({2, 5, 3, 4}, {2, 5, 4}, none({2, 5, 0})), "") << "no keys at all is legal";
}

}  // namespace
}  // namespace longhaul::testing
