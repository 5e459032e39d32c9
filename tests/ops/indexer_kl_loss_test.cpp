#include "longhaul/ops/indexer_kl_loss/indexer_kl_loss.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "longhaul/ops/common.h"
#include "longhaul/ops/lightning_indexer/lightning_indexer.h"
#include "tests/ops/attention_loops.h"
#include "tests/support/gradcheck.h"

namespace longhaul::testing {
namespace {

using ::testing::HasSubstr;

struct Case {
  const char* name;
  std::vector<std::vector<int64_t>> documents;
  int64_t H, D, K;
};

const Case kCases[] = {
    {"one slot", {{1}}, 1, 3, 4},
    {"one head", {{9}}, 1, 5, 3},
    {"odd sizes", {{13}, {13}}, 3, 7, 4},
    {"K larger than S", {{6}}, 2, 4, 11},
    {"documents of length 1", {{1, 1, 4, 1}}, 2, 4, 2},
    {"packed and padded", {{5, 4, -2}, {-3, 8, 0}}, 2, 4, 3},
    {"only padding", {{-4}}, 2, 4, 3},
    {"more than one block of queries", {{150, 120}, {270}}, 2, 4, 9},
};

Inputs operands(const Case& c) {
  const auto starts = doc_start(c.documents);
  const int64_t B = starts.size(0), S = starts.size(1);
  return {normal({B, S, c.H, c.D}, 1), normal({B, S, c.D}, 2), normal({B, S, c.H}, 3, 0.5)};
}

// Positive where a key is visible, as a sum over heads of probabilities.
at::Tensor head_sum_BSS(const at::Tensor& mask_BSS) {
  return normal(mask_BSS.sizes(), 11).exp() * mask_BSS;
}

// sum over t and s of p (log p - log r), written out over the keys of `mask`.
double kl_in_loops(const Inputs& x, const at::Tensor& head_sum, const at::Tensor& mask_BSS) {
  const auto scores = indexer_scores_in_loops(x[0], x[1], x[2]);
  const auto I = scores.accessor<double, 3>(), mass = head_sum.accessor<double, 3>();
  const auto mask = mask_BSS.accessor<bool, 3>();
  double loss = 0;
  for (int64_t b = 0; b < I.size(0); ++b) {
    for (int64_t t = 0; t < I.size(1); ++t) {
      double total = 0, partition = 0;
      for (int64_t s = 0; s < I.size(2); ++s) {
        if (!mask[b][t][s]) continue;
        total += mass[b][t][s];
        partition += std::exp(I[b][t][s]);
      }
      for (int64_t s = 0; s < I.size(2); ++s) {
        if (!mask[b][t][s] || mass[b][t][s] == 0) continue;
        const double p = mass[b][t][s] / total, r = std::exp(I[b][t][s]) / partition;
        loss += p * (std::log(p) - std::log(r));
      }
    }
  }
  return loss;
}

struct Sparse {
  at::Tensor indices, head_sum_BSK, head_sum_BSS, mask;
};

// Selected keys in random order with -1 in between, and their head sums.
Sparse sparse_of(const Case& c) {
  const auto starts = doc_start(c.documents);
  const int64_t B = starts.size(0), S = starts.size(1);
  const auto kept = topk_in_loops(normal({B, S, S}, 7), ops::visible_mask(starts), c.K + 1);
  const auto indices = kept.gather(2, normal(kept.sizes(), 8).argsort(int64_t{-1})).contiguous();
  const auto mask = ops::indices_to_mask(indices, S).contiguous();
  const auto whole = head_sum_BSS(mask);
  const auto index = indices.to(at::kLong);
  return {indices, whole.gather(2, index.clamp_min(0)).masked_fill(index < 0, 0), whole, mask};
}

Function sparse_loss(const Sparse& s) {
  return [s](const Inputs& x) {
    return ops::sparse_indexer_kl_loss({x[0], x[1], x[2]}, s.indices, s.head_sum_BSK);
  };
}

Function dense_loss(const at::Tensor& starts) {
  const auto sums = head_sum_BSS(ops::visible_mask(starts));
  return [starts, sums](const Inputs& x) {
    return ops::dense_indexer_kl_loss({x[0], x[1], x[2]}, starts, sums);
  };
}

TEST(IndexerKlLoss, EqualsTheFormula) {
  for (const auto& c : kCases) {
    const auto x = operands(c);
    const auto sparse = sparse_of(c);
    const double expected = kl_in_loops(x, sparse.head_sum_BSS, sparse.mask);
    EXPECT_NEAR(sparse_loss(sparse)(x).item<double>(), expected, 1e-13 * std::max(expected, 100.0))
        << c.name;
    const auto starts = doc_start(c.documents);
    const auto mask = ops::visible_mask(starts);
    const double dense = kl_in_loops(x, head_sum_BSS(mask), mask);
    EXPECT_NEAR(dense_loss(starts)(x).item<double>(), dense, 1e-13 * std::max(dense, 100.0))
        << c.name;
  }
}

TEST(IndexerKlLoss, Gradients) {
  for (const auto& c : kCases) {
    EXPECT_LT(gradient_error(sparse_loss(sparse_of(c)), operands(c)), 1e-7) << c.name;
    EXPECT_LT(gradient_error(dense_loss(doc_start(c.documents)), operands(c)), 1e-7) << c.name;
  }
}

TEST(IndexerKlLoss, Precision) {
  const Case c{"", {{33, 32}}, 4, 24, 9};
  for (const auto& f : {sparse_loss(sparse_of(c)), dense_loss(doc_start(c.documents))}) {
    EXPECT_LT(precision_error(f, operands(c), at::kFloat), 5e-6);
    // Scores and dI are fp32; each gradient is rounded to bf16 twice, before and after it is
    // scaled.
    EXPECT_LT(precision_error(f, operands(c), at::kBFloat16), 4e-3);
  }
}

// The factor 1/T is not rounded to bf16: 1/817 would be off by 0.27%, in every gradient alike.
TEST(IndexerKlLoss, ScalingIsNotRoundedToBf16) {
  const Case c{"", {{33}}, 4, 24, 9};
  const auto f = sparse_loss(sparse_of(c));
  const auto sum_of = [&](double factor) {
    Inputs x;
    for (const auto& tensor : operands(c)) x.push_back(tensor.to(at::kBFloat16));
    for (auto& leaf : x) leaf.set_requires_grad(true);
    torch::autograd::backward({f(x) * factor}, {});
    return x[0].grad().to(at::kDouble).abs().sum().item<double>();
  };
  EXPECT_NEAR(sum_of(1.0 / 817) * 817 / sum_of(1.0), 1.0, 2e-4);
}

TEST(IndexerKlLoss, IsZeroWithoutGradientWhereTheTargetIsReached) {
  const auto starts = doc_start({{6, -1}});
  const auto mask = ops::visible_mask(starts);
  const Case c{"", {{6, -1}}, 2, 4, 3};
  const auto x = operands(c);
  const auto scores = indexer_scores_in_loops(x[0], x[1], x[2]);
  const auto target = at::softmax(scores.masked_fill(mask.logical_not(), -1e30), -1) * mask;
  const Function f = [&](const Inputs& y) {
    return ops::dense_indexer_kl_loss({y[0], y[1], y[2]}, starts, target);
  };
  const auto result = evaluate(f, x);
  EXPECT_NEAR(result.value.item<double>(), 0.0, 1e-14);
  for (const auto& gradient : result.gradients) {
    EXPECT_LT(gradient.abs().max().item<double>(), 1e-14);
  }
}

// Only ratios of the head sum count, and probabilities that underflowed to 0 give no NaN.
TEST(IndexerKlLoss, TargetIsNormalisedAndMayHoldZeros) {
  const Case c{"", {{9}}, 2, 4, 4};
  auto sparse = sparse_of(c);
  const auto x = operands(c);
  const double loss = sparse_loss(sparse)(x).item<double>();
  sparse.head_sum_BSK = sparse.head_sum_BSK * 17;
  EXPECT_NEAR(sparse_loss(sparse)(x).item<double>(), loss, 1e-12);
  sparse.head_sum_BSK = sparse.head_sum_BSK * (normal(sparse.head_sum_BSK.sizes(), 5) > 0);
  const auto result = evaluate(sparse_loss(sparse), x);
  EXPECT_TRUE(result.value.isfinite().all().item<bool>());
  EXPECT_TRUE(result.gradients[0].isfinite().all().item<bool>());
}

TEST(IndexerKlLoss, LargeScoresStayFinite) {
  const Case c{"", {{9}}, 2, 4, 4};
  auto x = operands(c);
  for (auto& tensor : x) tensor = (tensor * 100).to(at::kFloat);
  const auto result = evaluate(sparse_loss(sparse_of(c)), x);
  EXPECT_TRUE(result.value.isfinite().all().item<bool>());
  for (const auto& gradient : result.gradients) {
    EXPECT_TRUE(gradient.isfinite().all().item<bool>());
  }
}

TEST(IndexerKlLoss, WithoutGradientsWanted) {
  const Case c{"", {{9}}, 2, 4, 4};
  const auto x = operands(c);
  EXPECT_FALSE(sparse_loss(sparse_of(c))(x).requires_grad());
}

TEST(IndexerKlLoss, BadInput) {
  const auto call = [](at::IntArrayRef key, at::IntArrayRef weights, at::IntArrayRef indices,
                       at::IntArrayRef head_sum) {
    return message_of([&] {
      ops::sparse_indexer_kl_loss({at::zeros({2, 5, 3, 4}), at::zeros(key), at::zeros(weights)},
                                  at::zeros(indices, at::kInt), at::zeros(head_sum));
    });
  };
  EXPECT_EQ(call({2, 5, 4}, {2, 5, 3}, {2, 5, 2}, {2, 5, 2}), "");
  EXPECT_THAT(call({2, 5, 6}, {2, 5, 3}, {2, 5, 2}, {2, 5, 2}),
              HasSubstr("key: expected [2 x any x 4], got [2 x 5 x 6]"));
  EXPECT_THAT(call({2, 5, 4}, {2, 5, 4}, {2, 5, 2}, {2, 5, 2}),
              HasSubstr("weights: expected [2 x 5 x 3], got [2 x 5 x 4]"));
  EXPECT_THAT(call({2, 5, 4}, {2, 5, 3}, {2, 4, 2}, {2, 4, 2}),
              HasSubstr("keys: expected [2 x 5 x any], got [2 x 4 x 2]"));
  EXPECT_THAT(call({2, 5, 4}, {2, 5, 3}, {2, 5, 2}, {2, 5, 5}),
              HasSubstr("head sum: expected [2 x 5 x 2], got [2 x 5 x 5]"));
}

}  // namespace
}  // namespace longhaul::testing
