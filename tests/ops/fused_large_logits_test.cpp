// The fused attention, indexer and losses at logits of thousands against the fp64 reference,
// forward and gradients, for the instruction set that LONGHAUL_ISA names (ctest runs this once for
// each). Operands are multiples of 1/8 whose products sum up exactly in fp32, so that what is
// compared is the softmax at large logits and not how scores round. Cross-entropy:
// fused_cross_entropy_test.cpp.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "longhaul/ops/common.h"
#include "longhaul/ops/flash_attention/head_sum.h"
#include "longhaul/ops/indexer_kl_loss/indexer_kl_loss.h"
#include "longhaul/ops/lightning_indexer/lightning_indexer.h"
#include "longhaul/ops/sparse_flash_attention/sparse_flash_attention.h"
#include "tests/ops/fused_kernels.h"
#include "tests/support/gradcheck.h"

namespace longhaul::testing {
namespace {

using ops::Kernel;

constexpr int64_t kHeads = 3, kWidth = 64, kValues = 32, kIndexHeads = 4, kIndexWidth = 32;
constexpr int64_t kTopK = 40;
constexpr double kScale = 0.125;
// What the first column adds to each score, before the scale.
constexpr double kQueryOffset = 1 << 15, kKeyOffset = 2;

at::Tensor eighths(at::IntArrayRef sizes, uint64_t seed) {
  return (integers(sizes, 31, seed) - 15).to(at::kDouble) / 8;
}

at::Tensor with_first_column(const at::Tensor& x, double value) {
  x.select(-1, 0).fill_(value);
  return x;
}

class FusedLargeLogits : public FusedKernels<at::ScalarType> {
 protected:
  static at::ScalarType dtype() { return GetParam(); }
  // 4e3 in fp32 is off by 2.4e-4 at most, which is the relative error of a probability.
  static double limit() { return dtype() == at::kFloat ? 3e-4 : 6e-3; }
  static at::ScalarType wide(at::ScalarType type) {
    return type == at::kDouble ? at::kDouble : at::kFloat;
  }

  const at::Tensor starts_ = doc_start({{160, 9}});
  const int64_t S_ = starts_.size(1);
  const at::Tensor query_ = with_first_column(eighths({1, S_, kHeads, kWidth}, 1), kQueryOffset);
  const at::Tensor index_query_ =
      with_first_column(eighths({1, S_, kIndexHeads, kIndexWidth}, 4), 1024);
  const at::Tensor index_key_ = with_first_column(eighths({1, S_, kIndexWidth}, 5), kKeyOffset);
  const at::Tensor index_weights_ = (integers({1, S_, kIndexHeads}, 4, 6) + 1).to(at::kDouble) / 4;

  // Query, key and, in the expanded form, value.
  Inputs attention(bool expanded) const {
    if (!expanded) return {query_, with_first_column(eighths({1, S_, kWidth}, 2), kKeyOffset)};
    return {query_, with_first_column(eighths({1, S_, kHeads, kWidth}, 2), kKeyOffset),
            eighths({1, S_, kHeads, kValues}, 3)};
  }
  static Inputs leaves_of(const Inputs& operands, at::ScalarType type) {
    Inputs leaves;
    for (const auto& x : operands) leaves.push_back(x.to(type).detach().set_requires_grad(true));
    return leaves;
  }
  ops::IndexerInputs indexer(at::ScalarType type) const {
    return {index_query_.to(type).detach().set_requires_grad(true),
            index_key_.to(type).detach().set_requires_grad(true),
            index_weights_.to(wide(type)).detach().set_requires_grad(true)};
  }
  at::Tensor selection() const {
    return ops::lightning_indexer(index_query_, index_key_, index_weights_, starts_, kTopK)
        .indices_BSK;
  }

  // The first column, which is much larger or smaller than the others, by itself.
  static void expect_close(const at::Tensor& actual, const at::Tensor& expected, double limit,
                           const std::string& what) {
    ASSERT_TRUE(actual.isfinite().all().item<bool>()) << what;
    EXPECT_LT(frobenius(actual.narrow(-1, 0, 1), expected.narrow(-1, 0, 1)), limit) << what;
    const int64_t others = expected.size(-1) - 1;
    EXPECT_LT(frobenius(actual.narrow(-1, 1, others), expected.narrow(-1, 1, others)), limit)
        << what << ", the other columns";
  }

  using Attention = std::function<ops::AttentionResult(const Inputs&, ops::AttentionOptions)>;

  void expect_attention(const Attention& f) const {
    for (const bool expanded : {false, true}) {
      const auto run = [&](at::ScalarType type, Kernel kernel) {
        const Inputs leaves = leaves_of(attention(expanded), type);
        const auto result = f(leaves, {.scale = kScale,
                                       .value_dim = kValues,
                                       .return_head_sum = true,
                                       .return_statistics = true,
                                       .kernel = kernel});
        const auto d_out = eighths(result.out_BSHV.sizes(), 8).to(type);
        return std::pair(result, torch::autograd::grad({(result.out_BSHV * d_out).sum()}, leaves));
      };
      const auto [expected, d_expected] = run(at::kDouble, Kernel::kReference);
      const auto [actual, d_actual] = run(dtype(), Kernel::kFused);
      EXPECT_GT(expected.softmax_max.max().item<double>(), 4000);
      expect_close(actual.out_BSHV, expected.out_BSHV, limit(), "out");
      EXPECT_LT(frobenius(actual.softmax_max, expected.softmax_max), 1e-6);
      EXPECT_LT(frobenius(actual.softmax_sum, expected.softmax_sum), 3e-4);
      EXPECT_LT(frobenius(actual.head_sum, expected.head_sum), 3e-4);
      for (size_t i = 0; i < d_expected.size(); ++i) {
        expect_close(d_actual[i], d_expected[i], limit(), "gradient " + std::to_string(i));
      }
    }
  }

  // The loss and its gradients, of fp64 operands in the reference and of dtype() in the fused
  // kernel.
  void expect_gradients(
      const std::function<ops::KlGradients(const ops::IndexerInputs&, Kernel)>& f) const {
    const auto expected = f(indexer(at::kDouble), Kernel::kReference);
    const auto actual = f(indexer(dtype()), Kernel::kFused);
    EXPECT_LT(frobenius(actual.loss, expected.loss), 1e-5);
    expect_close(actual.grads.query_BSHD, expected.grads.query_BSHD, limit(), "query");
    expect_close(actual.grads.key_BSD, expected.grads.key_BSD, limit(), "key");
    expect_close(actual.grads.weights_BSH, expected.grads.weights_BSH, 3e-4, "weights");
  }

  void expect_loss(const std::function<at::Tensor(const ops::IndexerInputs&, Kernel)>& f) const {
    expect_gradients([&](const ops::IndexerInputs& in, Kernel kernel) -> ops::KlGradients {
      const auto loss = f(in, kernel);
      const auto d = torch::autograd::grad({loss}, {in.query_BSHD, in.key_BSD, in.weights_BSH});
      return {loss, {d[0], d[1], d[2]}};
    });
  }

  // Of an attention with small logits: its head sums are the same in both kernels.
  ops::AttentionState small_attention(at::ScalarType type, Kernel kernel) const {
    const auto query = eighths({1, S_, kHeads, kWidth}, 1).to(type);
    const auto key = eighths({1, S_, kWidth}, 2).to(type);
    const auto r = ops::flash_attention(
        query, key, {}, starts_,
        {.scale = kScale, .value_dim = kValues, .return_statistics = true, .kernel = kernel});
    return {.query_BSHD = query,
            .key = key,
            .softmax_max = r.softmax_max,
            .softmax_sum = r.softmax_sum,
            .scale = kScale};
  }
};

TEST_P(FusedLargeLogits, DenseAttention) {
  expect_attention([&](const Inputs& x, const ops::AttentionOptions& options) {
    return ops::flash_attention(x[0], x[1], x.size() > 2 ? x[2] : at::Tensor(), starts_, options);
  });
}

TEST_P(FusedLargeLogits, SparseAttention) {
  expect_attention([&](const Inputs& x, const ops::AttentionOptions& options) {
    return ops::sparse_flash_attention(x[0], x[1], x.size() > 2 ? x[2] : at::Tensor(), selection(),
                                       options);
  });
}

TEST_P(FusedLargeLogits, HeadSumFromSavedStatistics) {
  const auto chosen = selection();
  for (const bool expanded : {false, true}) {
    const Inputs operands = attention(expanded);
    const auto run = [&](at::ScalarType type, Kernel kernel) {
      const auto query = operands[0].to(type), key = operands[1].to(type);
      const auto value = expanded ? operands[2].to(type) : at::Tensor();
      const auto r = ops::sparse_flash_attention(query, key, value, chosen,
                                                 {.scale = kScale,
                                                  .value_dim = kValues,
                                                  .return_head_sum = true,
                                                  .return_statistics = true,
                                                  .kernel = kernel});
      return std::pair(r.head_sum, ops::sparse_attention_head_sum({.query_BSHD = query,
                                                                   .key = key,
                                                                   .softmax_max = r.softmax_max,
                                                                   .softmax_sum = r.softmax_sum,
                                                                   .scale = kScale},
                                                                  chosen));
    };
    const auto [expected, of_reference] = run(at::kDouble, Kernel::kReference);
    EXPECT_LT(frobenius(of_reference, expected, kSmall), 1e-11);
    const auto found = run(dtype(), Kernel::kFused).second;
    ASSERT_TRUE(found.isfinite().all().item<bool>());
    EXPECT_LT(frobenius(found, expected, kSmall), 1e-3);
  }
}

TEST_P(FusedLargeLogits, IndexerAndItsGradient) {
  const auto expected =
      ops::lightning_indexer(index_query_, index_key_, index_weights_, starts_, kTopK);
  const auto in = indexer(dtype());
  const auto actual = ops::lightning_indexer(in.query_BSHD, in.key_BSD, in.weights_BSH, starts_,
                                             kTopK, Kernel::kFused);
  EXPECT_GT(expected.scores_BSK.max().item<double>(), 4000);
  EXPECT_TRUE(at::equal(actual.indices_BSK, expected.indices_BSK));
  EXPECT_TRUE(at::equal(actual.scores_BSK.to(at::kDouble), expected.scores_BSK));
  const auto d_scores = eighths(expected.scores_BSK.sizes(), 9);
  const auto d_expected =
      ops::lightning_indexer_grad(indexer(at::kDouble), expected.indices_BSK, d_scores);
  const auto d_actual = ops::lightning_indexer_grad(in, expected.indices_BSK,
                                                    d_scores.to(at::kFloat), Kernel::kFused);
  const double exact = dtype() == at::kFloat ? 1e-6 : 4e-3;  // rounded once
  expect_close(d_actual.query_BSHD, d_expected.query_BSHD, exact, "query");
  expect_close(d_actual.key_BSD, d_expected.key_BSD, exact, "key");
  expect_close(d_actual.weights_BSH, d_expected.weights_BSH, 1e-6, "weights");
}

TEST_P(FusedLargeLogits, SparseIndexerLoss) {
  const auto chosen = selection();
  const auto head_sum = eighths(chosen.sizes(), 10).exp().masked_fill(chosen < 0, 0);
  expect_loss([&](const ops::IndexerInputs& in, Kernel kernel) {
    return ops::sparse_indexer_kl_loss(in, chosen, head_sum.to(wide(in.query_BSHD.scalar_type())),
                                       kernel);
  });
}

TEST_P(FusedLargeLogits, DenseIndexerLoss) {
  expect_loss([&](const ops::IndexerInputs& in, Kernel kernel) {
    return ops::dense_indexer_kl_loss(in, small_attention(in.query_BSHD.scalar_type(), kernel),
                                      starts_, {.kernel = kernel});
  });
}

TEST_P(FusedLargeLogits, DenseIndexerLossWithKnownSoftmax) {
  expect_gradients([&](const ops::IndexerInputs& in, Kernel kernel) {
    const ops::HeadSums sums(small_attention(in.query_BSHD.scalar_type(), kernel), starts_, kernel);
    return ops::dense_indexer_kl_gradients(
        in, starts_, [&](const ops::QueryBlock& block) { return sums.of(block); },
        {.kernel = kernel, .softmax = ops::dense_indexer_softmax(in, starts_, kernel)});
  });
}

// The largest score is exact. Scores of 1e4 in base 2 are off by 5e-4 at most, as are the terms of
// the sum.
TEST_P(FusedLargeLogits, SoftmaxOfTheIndexScores) {
  const auto expected =
      ops::dense_indexer_softmax(indexer(at::kDouble), starts_, Kernel::kReference);
  const auto actual = ops::dense_indexer_softmax(indexer(dtype()), starts_, Kernel::kFused);
  EXPECT_GT(expected.max_BS.max().item<double>(), 4000);
  EXPECT_TRUE(at::equal(actual.max_BS.to(at::kDouble), expected.max_BS));
  EXPECT_LT(frobenius(actual.sum_BS, expected.sum_BS), 5e-4);
}

INSTANTIATE_TEST_SUITE_P(Dtypes, FusedLargeLogits, ::testing::Values(at::kFloat, at::kBFloat16));

}  // namespace
}  // namespace longhaul::testing
