// What the fused operators of attention and the indexer refuse: each wrong shape and dtype with
// what was expected and what came.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "include/longhaul/kernels.h"
#include "longhaul/ops/common.h"
#include "longhaul/ops/indexer_kl_loss/indexer_kl_loss.h"
#include "longhaul/ops/lightning_indexer/lightning_indexer.h"
#include "longhaul/ops/sparse_flash_attention/sparse_flash_attention.h"
#include "tests/support/tensors.h"

namespace longhaul::testing {
namespace {

using ops::Kernel;
using ::testing::HasSubstr;

constexpr int64_t kB = 1, kS = 5, kHeads = 2, kWidth = 32, kTopK = 3;

class FusedErrors : public ::testing::TestWithParam<at::ScalarType> {
 protected:
  static at::ScalarType dtype() { return GetParam(); }
  static at::ScalarType other() { return dtype() == at::kFloat ? at::kBFloat16 : at::kFloat; }
  static at::Tensor zeros(at::IntArrayRef sizes) { return at::zeros(sizes, dtype()); }
  // "expected Float, the dtype of the query, got BFloat16", or the other way round.
  static std::string dtype_text(const std::string& what) {
    return what + ": expected " + c10::toString(dtype()) + ", the dtype of the query, got " +
           c10::toString(other());
  }

  const at::Tensor starts_ = doc_start({{kS}});
  const at::Tensor chosen_ = at::full({kB, kS, kTopK}, -1, at::kInt);
  const at::Tensor query_ = zeros({kB, kS, kHeads, kWidth});
  const at::Tensor shared_key_ = zeros({kB, kS, kWidth});
  const at::Tensor key_ = zeros({kB, kS, kHeads, kWidth});
};

// Operands of an attention, one of them wrong, and the message's part.
struct Wrong {
  at::Tensor query, key, value, keys;  // `keys`: indices, or where the documents start
  std::string message;
  int64_t value_dim = kWidth;
};

TEST_P(FusedErrors, SparseAttention) {
  const std::vector<Wrong> all = {
      {query_[0],
       shared_key_,
       {},
       chosen_,
       "attention query: expected 4 dimensions, got [5 x 2 x 32]"},
      {query_,
       zeros({kB, kS, 64}),
       {},
       chosen_,
       "attention key: expected [1 x any x 32], got [1 x 5 x 64]"},
      {query_,
       zeros({2, kS, kWidth}),
       {},
       chosen_,
       "attention key: expected [1 x any x 32], got [2 x 5 x 32]"},
      {query_, key_.narrow(2, 0, 1), key_, chosen_,
       "attention key: expected [1 x any x 2 x 32], got [1 x 5 x 1 x 32]"},
      {query_, key_, key_.narrow(1, 0, 4), chosen_,
       "attention value: expected [1 x 5 x 2 x any], got [1 x 4 x 2 x 32]"},
      {query_,
       key_,
       {},
       chosen_,
       "attention without a value tensor: expected a key [B, S, 32], whose first columns are the "
       "values, and value_dim 1 to 32, got [1 x 5 x 2 x 32] and 32"},
      {query_, shared_key_, {}, chosen_, "value_dim 1 to 32, got [1 x 5 x 32] and 33", 33},
      {query_,
       shared_key_,
       {},
       chosen_.narrow(1, 0, 4),
       "sparse attention indices: expected [1 x 5 x any], got [1 x 4 x 3]"},
      {query_,
       shared_key_,
       {},
       chosen_.to(at::kFloat),
       "sparse attention indices: expected Int or Long, got Float"},
      {query_,
       shared_key_,
       {},
       at::full_like(chosen_, kS),
       "sparse_flash_attention: indices: expected -1 to 4 (L - 1), got 5 in row 0"},
      {query_,
       shared_key_,
       {},
       at::full_like(chosen_, int64_t{1} << 32, at::kLong),
       "sparse_flash_attention: indices: expected -1 to 4 (L - 1), got 2147483647 in row 0"},
      {query_, key_, key_, at::full_like(chosen_, -2),
       "sparse_flash_attention: indices: expected -1 to 4 (L - 1), got -2 in row 0"},
      {query_, shared_key_.to(other()), {}, chosen_, dtype_text("attention key")},
      {query_, key_, key_.to(other()), chosen_, dtype_text("attention value")}};
  for (const auto& x : all) {
    EXPECT_THAT(message_of([&] {
                  ops::sparse_flash_attention(x.query, x.key, x.value, x.keys,
                                              {.value_dim = x.value_dim, .kernel = Kernel::kFused});
                }),
                HasSubstr(x.message));
  }
}

TEST_P(FusedErrors, DenseAttention) {
  const std::vector<Wrong> all = {
      {query_, key_.narrow(2, 0, 1), key_, starts_,
       "attention key: expected [1 x any x 2 x 32], got [1 x 5 x 1 x 32]"},
      {query_, key_, key_.narrow(1, 0, 4), starts_,
       "attention value: expected [1 x 5 x 2 x any], got [1 x 4 x 2 x 32]"},
      {query_,
       key_,
       {},
       starts_,
       "attention without a value tensor: expected a key [B, S, 32], whose first columns are the "
       "values, and value_dim 1 to 32, got [1 x 5 x 2 x 32] and 32"},
      {query_, key_, key_, doc_start({{6}}), "attention doc_start: expected [1 x 5], got [1 x 6]"},
      {query_, key_, key_, starts_.to(at::kInt), "attention doc_start: expected Long, got Int"},
      {query_, key_, key_, starts_ - 1,
       "first_key and last_key: expected 0 to 4 (L - 1), got -1 and 0 of query 0"},
      {query_, key_.to(other()), key_, starts_, dtype_text("attention key")},
      {query_, key_, key_.to(other()), starts_, dtype_text("attention value")}};
  for (const auto& x : all) {
    EXPECT_THAT(message_of([&] {
                  ops::flash_attention(x.query, x.key, x.value, x.keys,
                                       {.value_dim = x.value_dim, .kernel = Kernel::kFused});
                }),
                HasSubstr(x.message));
  }
}

// What the indexer's operators share, and what each checks by itself.
TEST_P(FusedErrors, Indexer) {
  const auto weights = at::zeros({kB, kS, kHeads});
  const auto select = [&](const at::Tensor& query, const at::Tensor& key, const at::Tensor& w,
                          const at::Tensor& starts, int64_t topk = kTopK) {
    return message_of([&] { ops::lightning_indexer(query, key, w, starts, topk, Kernel::kFused); });
  };
  EXPECT_THAT(select(query_, shared_key_, weights, starts_, 0),
              HasSubstr("topk: expected at least 1, got 0"));
  EXPECT_THAT(select(query_[0], shared_key_, weights, starts_),
              HasSubstr("indexer query: expected 4 dimensions, got [5 x 2 x 32]"));
  EXPECT_THAT(select(query_, shared_key_.flatten(), weights, starts_),
              HasSubstr("indexer key: expected [1 x any x 32], got [160]"));
  EXPECT_THAT(select(query_, shared_key_, weights.narrow(2, 0, 1), starts_),
              HasSubstr("indexer weights: expected [1 x 5 x 2], got [1 x 5 x 1]"));
  EXPECT_THAT(select(query_, shared_key_.to(other()), weights, starts_),
              HasSubstr(dtype_text("indexer key")));
  EXPECT_THAT(select(query_, shared_key_, weights.to(at::kInt), starts_),
              HasSubstr("indexer weights: expected floating-point numbers, got Int"));
  EXPECT_THAT(select(query_, shared_key_, weights, doc_start({{4}})),
              HasSubstr("lightning_indexer: doc_start: expected [1 x 5], got [1 x 4]"));

  const ops::IndexerInputs in = {query_, shared_key_, weights};
  const auto scores = at::zeros({kB, kS, kTopK});
  const auto grad = [&](const ops::IndexerInputs& inputs, const at::Tensor& indices,
                        const at::Tensor& d_scores) {
    return message_of(
        [&] { ops::lightning_indexer_grad(inputs, indices, d_scores, Kernel::kFused); });
  };
  EXPECT_THAT(grad({query_, shared_key_.to(other()), weights}, chosen_, scores),
              HasSubstr(dtype_text("indexer key")));
  EXPECT_THAT(grad(in, chosen_[0], scores),
              HasSubstr("indexer gradient: indices: expected [1 x 5 x any], got [5 x 3]"));
  EXPECT_THAT(grad(in, chosen_.to(at::kFloat), scores),
              HasSubstr("indexer gradient: indices: expected Int or Long, got Float"));
  EXPECT_THAT(grad(in, at::full_like(chosen_, int64_t{1} << 32, at::kLong), scores),
              HasSubstr("indices: expected -1 to 4 (L - 1), got 2147483647 in row 0"));
  EXPECT_THAT(grad(in, chosen_, scores.narrow(2, 0, 2)),
              HasSubstr("indexer gradient: d_scores: expected [1 x 5 x 3], got [1 x 5 x 2]"));
}

TEST_P(FusedErrors, SparseIndexerLoss) {
  const ops::IndexerInputs in = {query_, shared_key_, at::zeros({kB, kS, kHeads})};
  const auto sums = at::zeros({kB, kS, kTopK});
  const auto loss = [&](const ops::IndexerInputs& inputs, const at::Tensor& indices,
                        const at::Tensor& head_sum, const at::Tensor& scores = {}) {
    return message_of(
        [&] { ops::sparse_indexer_kl_loss(inputs, indices, head_sum, Kernel::kFused, scores); });
  };
  EXPECT_THAT(loss({query_, shared_key_.to(other()), in.weights_BSH}, chosen_, sums),
              HasSubstr(dtype_text("indexer key")));
  EXPECT_THAT(loss(in, chosen_.narrow(1, 0, 4), sums),
              HasSubstr("indexer loss: keys: expected [1 x 5 x any], got [1 x 4 x 3]"));
  EXPECT_THAT(loss(in, chosen_.to(at::kFloat), sums),
              HasSubstr("indexer loss: keys: expected Int or Long, got Float"));
  EXPECT_THAT(loss(in, chosen_, sums.narrow(2, 0, 2)),
              HasSubstr("indexer loss: head sum: expected [1 x 5 x 3], got [1 x 5 x 2]"));
  EXPECT_THAT(loss(in, chosen_, chosen_),
              HasSubstr("indexer loss: head sum: expected floating-point numbers, got Int"));
  EXPECT_THAT(loss(in, chosen_, sums, sums[0]),
              HasSubstr("indexer loss: scores: expected [1 x 5 x 3], got [5 x 3]"));
  EXPECT_THAT(loss(in, at::full_like(chosen_, 5), sums),
              HasSubstr("indices: expected -1 to 4 (L - 1), got 5 in row 0"));
  EXPECT_THAT(loss(in, at::full_like(chosen_, int64_t{1} << 32, at::kLong), sums),
              HasSubstr("indices: expected -1 to 4 (L - 1), got 2147483647 in row 0"));
}

TEST_P(FusedErrors, DenseIndexerLoss) {
  const ops::IndexerInputs in = {query_, shared_key_, at::zeros({kB, kS, kHeads})};
  const auto statistics = at::ones({kB, kS, kHeads});
  const ops::AttentionState good = {
      .query_BSHD = query_, .key = key_, .softmax_max = statistics, .softmax_sum = statistics};
  const auto loss = [&](const ops::AttentionState& state, const at::Tensor& starts) {
    return message_of(
        [&] { ops::dense_indexer_kl_loss(in, state, starts, {.kernel = Kernel::kFused}); });
  };
  auto state = good;
  state.softmax_sum = good.softmax_sum.narrow(2, 0, 1);
  EXPECT_THAT(loss(state, starts_),
              HasSubstr("attention softmax_sum: expected [1 x 5 x 2], got [1 x 5 x 1]"));
  state = good;
  state.key = good.key.narrow(1, 0, 4);
  EXPECT_THAT(loss(state, starts_),
              HasSubstr("attention key: expected [1 x 5 x 2 x 32], got [1 x 4 x 2 x 32]"));
  state = good;
  state.key = good.key.to(other());
  EXPECT_THAT(loss(state, starts_), HasSubstr(dtype_text("attention key")));
  EXPECT_THAT(loss(good, doc_start({{6}})),
              HasSubstr("indexer loss: doc_start: expected [1 x 5], got [1 x 6]"));
}

// The same of the functions in C, whose callers have no other check.
TEST(KernelErrors, SayWhatWasExpectedAndWhatCame) {
  longhaul_sparse_attention_args good = {};
  good.B = good.S = good.L = good.H = good.K = 1;
  good.D = good.V = 32;
  const auto sparse = [&](int64_t longhaul_sparse_attention_args::*size, int64_t value) {
    auto args = good;
    args.*size = value;
    return std::string(longhaul_sparse_attention(&args, nullptr));
  };
  using Args = longhaul_sparse_attention_args;
  EXPECT_EQ(sparse(&Args::B, -1), "B: expected at least 0, got -1");
  EXPECT_EQ(sparse(&Args::L, int64_t{1} << 31), "L: expected at most 2^30 keys, got 2147483648");
  EXPECT_EQ(sparse(&Args::K, int64_t{1} << 31), "K: expected at most 2^30 keys, got 2147483648");
  EXPECT_EQ(sparse(&Args::D, int64_t{1} << 61),
            "D: expected at most 2^20 columns, got 2305843009213693952");
  EXPECT_EQ(sparse(&Args::H, 129), "H: expected 1 to 128 heads, got 129");
  EXPECT_EQ(sparse(&Args::D, 33), "D: expected a positive multiple of 32, got 33");
  EXPECT_EQ(sparse(&Args::V, 0), "V: expected a positive multiple of 32, got 0");
  EXPECT_EQ(sparse(&Args::V, 64), "V: expected at most 32 (D), got 64");
  EXPECT_EQ(sparse(&Args::K, 0), "K: expected at least 1, got 0");

  longhaul_sparse_attention_expanded_args expanded = {};
  expanded.H = expanded.K = 1;
  expanded.D = expanded.V = expanded.key_stride = 32;
  EXPECT_STREQ(longhaul_sparse_attention_expanded(&expanded, nullptr),
               "value_stride: expected at least 32, got 0");

  longhaul_flash_attention_args flash = {};
  flash.H = 4;
  flash.D = flash.V = 32;
  flash.key_heads = 2;
  EXPECT_STREQ(longhaul_flash_attention(&flash, nullptr), "key_heads: expected 1 or 4 (H), got 2");

  longhaul_lightning_indexer_args indexer = {};
  indexer.dtype = LONGHAUL_BFLOAT16;
  indexer.H = indexer.K = 1;
  indexer.D = 3;
  EXPECT_STREQ(longhaul_lightning_indexer(&indexer, nullptr),
               "D: expected an even number for bf16, got 3");

  float none = 0;
  longhaul_indexer_kl_loss_args loss = {};
  loss.H = loss.K = 1;
  loss.D = 32;
  loss.d_query = &none;
  EXPECT_STREQ(longhaul_indexer_kl_loss(&loss, nullptr),
               "d_query, d_key and d_weights: expected all three or none, got 1 of them");

  longhaul_dense_indexer_kl_loss_args dense = {};
  dense.H = 1;
  dense.D = 32;
  dense.S = 129;
  EXPECT_STREQ(longhaul_dense_indexer_kl_loss(&dense, nullptr),
               "S: expected at most 128 queries, got 129");
}

INSTANTIATE_TEST_SUITE_P(Dtypes, FusedErrors, ::testing::Values(at::kFloat, at::kBFloat16));

}  // namespace
}  // namespace longhaul::testing
