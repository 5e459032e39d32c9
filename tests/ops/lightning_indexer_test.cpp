#include "longhaul/ops/lightning_indexer/lightning_indexer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "longhaul/ops/common.h"
#include "tests/ops/attention_loops.h"
#include "tests/support/gradcheck.h"

namespace longhaul::testing {
namespace {

using ::testing::HasSubstr;

struct Operands {
  at::Tensor query, key, weights;
};

// Weights of both signs.
Operands operands(int64_t B, int64_t S, int64_t H, int64_t D, at::ScalarType dtype = at::kDouble) {
  return {normal({B, S, H, D}, 1, 1, dtype), normal({B, S, D}, 2, 1, dtype),
          normal({B, S, H}, 3, 0.3, dtype)};
}

struct Case {
  const char* name;
  std::vector<std::vector<int64_t>> documents;
  int64_t H, D, K;
};

const Case kCases[] = {
    {"one slot", {{1}}, 1, 4, 3},
    {"one head, K = 1", {{9}}, 1, 3, 1},
    {"K larger than S", {{7}, {7}}, 2, 5, 16},
    {"K = S", {{7}}, 2, 5, 7},
    {"odd sizes", {{33}, {33}}, 3, 7, 5},
    {"documents of length 1", {{1, 1, 5, 1, 3}}, 2, 4, 2},
    {"packed and padded", {{5, 4, -2}, {-3, 8, 0}}, 2, 4, 3},
    {"padding between and only", {{3, -2, 6}, {-11, 0, 0}}, 2, 4, 3},
    {"more than one block of queries", {{150, 120}, {270}}, 2, 4, 9},
};

TEST(LightningIndexer, EqualsTheRuleWrittenOut) {
  for (const auto& c : kCases) {
    const auto starts = doc_start(c.documents);
    const int64_t B = starts.size(0), S = starts.size(1);
    const auto in = operands(B, S, c.H, c.D);
    const auto result = ops::lightning_indexer(in.query, in.key, in.weights, starts, c.K);
    const auto scores = indexer_scores_in_loops(in.query, in.key, in.weights);
    const auto expected = topk_in_loops(scores, ops::visible_mask(starts), std::min(c.K, S));
    EXPECT_TRUE(at::equal(result.indices_BSK, expected)) << c.name;
    const auto index = expected.to(at::kLong);
    const auto chosen = scores.gather(2, index.clamp_min(0)).masked_fill(index < 0, 0);
    EXPECT_LT((result.scores_BSK - chosen).abs().max().item<double>(), 1e-13) << c.name;
    EXPECT_LT(
        (ops::indexer_scores(in.query, in.key, in.weights) - scores).abs().max().item<double>(),
        1e-13)
        << c.name;
  }
}

TEST(LightningIndexer, TiesGoToTheLowestKey) {
  const int64_t S = 40;
  const auto starts = doc_start({{25, 15}});
  const auto visible = ops::visible_mask(starts);
  for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
    // Weights 0: every score is 0, also -0.
    auto in = operands(1, S, 2, 4, dtype);
    in.weights = at::zeros_like(in.weights);
    in.weights.select(2, 0).fill_(-0.0);
    auto result = ops::lightning_indexer(in.query, in.key, in.weights, starts, 6);
    EXPECT_TRUE(at::equal(result.indices_BSK, topk_in_loops(at::zeros({1, S, S}), visible, 6)));

    // Integers: exact scores of few values, many ties at the boundary, many zeros from relu.
    in = {(integers({1, S, 2, 3}, 3, 1) - 1).to(dtype), (integers({1, S, 3}, 3, 2) - 1).to(dtype),
          (integers({1, S, 2}, 3, 3) - 1).to(dtype)};
    const auto scores = indexer_scores_in_loops(in.query.to(at::kDouble), in.key.to(at::kDouble),
                                                in.weights.to(at::kDouble));
    result = ops::lightning_indexer(in.query, in.key, in.weights, starts, 6);
    EXPECT_TRUE(at::equal(result.indices_BSK, topk_in_loops(scores, visible, 6)))
        << c10::toString(dtype);
  }
}

TEST(LightningIndexer, Precision) {
  const auto in = operands(2, 33, 4, 65);
  const auto error = [&](at::ScalarType dtype) {
    const auto q = in.query.to(dtype), k = in.key.to(dtype), w = in.weights.to(dtype);
    return frobenius_error(
        ops::indexer_scores(q, k, w),
        indexer_scores_in_loops(q.to(at::kDouble), k.to(at::kDouble), w.to(at::kDouble)));
  };
  // Products and sums are fp32 in both cases, so bf16 operands lose nothing more.
  EXPECT_LT(error(at::kFloat), 1e-6);
  EXPECT_LT(error(at::kBFloat16), 1e-6);
}

TEST(LightningIndexer, LargeLogitsStayFinite) {
  auto in = operands(1, 20, 2, 8, at::kBFloat16);
  const auto result =
      ops::lightning_indexer(in.query * 1e4, in.key * 1e4, in.weights * 1e4, doc_start({{20}}), 4);
  EXPECT_TRUE(result.scores_BSK.isfinite().all().item<bool>());
  EXPECT_EQ((result.indices_BSK >= 0).sum().item<int64_t>(), 1 + 2 + 3 + 17 * 4);
}

// A key that the query wants most stands far back: at the start, at either side of the block sizes
// that kernels use, and in the query's own slot.
TEST(LightningIndexer, FindsAPlantedKeyAtLongDistance) {
  const int64_t S = 2048, H = 2, D = 8, K = 4;
  const auto starts = at::zeros({1, S}, at::kLong);
  at::Tensor query = normal({1, S, H, D}, 1, 0.1, at::kFloat);
  at::Tensor key = normal({1, S, D}, 2, 0.1, at::kFloat);
  const at::Tensor weights = at::ones({1, S, H});
  const std::vector<std::pair<int64_t, int64_t>> planted = {
      {2047, 0},    {2046, 31},   {2045, 32},   {2044, 47},   {2043, 48},  {2042, 63},
      {2041, 64},   {2040, 127},  {2039, 128},  {2038, 511},  {2037, 512}, {2036, 1023},
      {2035, 1024}, {2034, 2034}, {2033, 2032}, {1536, 1535}, {1025, 1},
  };
  for (size_t i = 0; i < planted.size(); ++i) {
    const auto direction = normal({D}, 100 + i, 1, at::kFloat);
    query[0][planted[i].first].copy_(direction.expand({H, D}));
    key[0][planted[i].second].copy_(direction * 3);
  }
  const auto result = ops::lightning_indexer(query, key, weights, starts, K);
  for (const auto& [t, s] : planted) {
    EXPECT_TRUE((result.indices_BSK[0][t] == s).any().item<bool>()) << t << " wants " << s;
  }
  // Not all rows just take their last keys.
  const auto last = at::arange(S - K, S, at::kInt);
  EXPECT_FALSE(at::equal(result.indices_BSK[0][S - 1], last));
}

// A document boundary hides the best key of all.
TEST(LightningIndexer, DoesNotFindAPlantedKeyOfAnotherDocument) {
  const int64_t S = 128;
  at::Tensor query = normal({1, S, 1, 8}, 1, 0.1), key = normal({1, S, 8}, 2, 0.1);
  key[0][63].copy_(query[0][100][0] * 100);
  key[0][64].copy_(query[0][100][0] * 50);
  const auto result = ops::lightning_indexer(query, key, at::ones({1, S, 1}, at::kDouble),
                                             doc_start({{64, 64}}), 4);
  EXPECT_EQ(result.indices_BSK[0][100][0].item<int>(), 64);
}

// NaN counts as the largest score: the row keeps its keys and passes the NaN on, so that a broken
// weight shows in the loss and does not turn into an empty row, which attends to nothing.
TEST(LightningIndexer, NansDoNotEmptyTheRow) {
  auto in = operands(1, 12, 2, 4);
  in.key[0][3].fill_(NAN);
  const auto result = ops::lightning_indexer(in.query, in.key, in.weights, doc_start({{12}}), 4);
  for (int64_t t = 0; t < 12; ++t) {
    EXPECT_EQ((result.indices_BSK[0][t] >= 0).sum().item<int64_t>(), std::min<int64_t>(t + 1, 4));
    EXPECT_EQ(result.scores_BSK[0][t].isnan().any().item<bool>(), t >= 3) << t;
  }
  in.query.fill_(NAN);
  const auto all = ops::lightning_indexer(in.query, in.key, in.weights, doc_start({{12}}), 4);
  EXPECT_TRUE(at::equal(all.indices_BSK[0][11], at::arange(4, at::kInt))) << "ties, lowest first";
}

TEST(LightningIndexer, HasNoGradient) {
  auto in = operands(1, 5, 2, 4);
  in.query.set_requires_grad(true);
  in.key.set_requires_grad(true);
  const auto result = ops::lightning_indexer(in.query, in.key, in.weights, doc_start({{5}}), 4);
  EXPECT_FALSE(result.scores_BSK.requires_grad());
}

TEST(LightningIndexer, ThreadsDoNotChangeABit) {
  const auto in = operands(2, 65, 4, 16, at::kFloat);
  const auto run = [&](int threads) {
    const int before = at::get_num_threads();
    at::set_num_threads(threads);
    auto scores = ops::indexer_scores(in.query, in.key, in.weights);
    at::set_num_threads(before);
    return scores;
  };
  EXPECT_TRUE(at::equal(run(1), run(2)));
}

TEST(MaskAndIndices, AreInverse) {
  const auto mask = integers({2, 6, 9}, 2, 1).to(at::kBool);
  const auto indices = ops::mask_to_indices(mask, 9);
  EXPECT_TRUE(at::equal(ops::indices_to_mask(indices, 9), mask));
  for (int64_t t = 0; t < 6; ++t) {
    const auto row = indices[1][t];
    const int64_t n = mask[1][t].sum().item<int64_t>();
    EXPECT_TRUE((row.narrow(0, n, 9 - n) == -1).all().item<bool>());
    EXPECT_TRUE(at::equal(row.narrow(0, 0, n), std::get<0>(row.narrow(0, 0, n).sort())));
  }
}

TEST(MaskAndIndices, MinusOneAnywhereAndIndicesOutOfRange) {
  const auto indices = at::tensor({-1, 4, -1, 0}, at::kInt).view({1, 1, 4});
  EXPECT_TRUE(at::equal(ops::indices_to_mask(indices, 5),
                        at::tensor({1, 0, 0, 0, 1}, at::kLong).to(at::kBool).view({1, 1, 5})));
  for (const int outside : {5, 6, 1000}) {
    const auto wrong = at::tensor({0, outside}, at::kInt).view({1, 1, 2});
    EXPECT_NE(message_of([&] { ops::indices_to_mask(wrong, 5); }), "") << outside << " of 5 keys";
  }
}

TEST(LightningIndexer, BadInput) {
  const auto in = operands(2, 5, 3, 4);
  const auto starts = at::zeros({2, 5}, at::kLong);
  const auto call = [&](const at::Tensor& q, const at::Tensor& k, const at::Tensor& w,
                        const at::Tensor& s, int64_t topk) {
    return message_of([&] { ops::lightning_indexer(q, k, w, s, topk); });
  };
  EXPECT_THAT(call(in.query, in.key, in.weights, starts, 0),
              HasSubstr("topk: expected at least 1, got 0"));
  EXPECT_THAT(call(in.query[0], in.key, in.weights, starts, 2),
              HasSubstr("indexer query: expected 4 dimensions, got [5 x 3 x 4]"));
  EXPECT_THAT(call(in.query, at::zeros({2, 5, 6}), in.weights, starts, 2),
              HasSubstr("indexer key: expected [2 x any x 4], got [2 x 5 x 6]"));
  EXPECT_THAT(call(in.query, in.key, at::zeros({2, 5, 2}), starts, 2),
              HasSubstr("indexer weights: expected [2 x 5 x 3], got [2 x 5 x 2]"));
  EXPECT_THAT(call(in.query, in.key, in.weights, at::zeros({2, 4}, at::kLong), 2),
              HasSubstr("doc_start: expected [2 x 5], got [2 x 4]"));
}

}  // namespace
}  // namespace longhaul::testing
