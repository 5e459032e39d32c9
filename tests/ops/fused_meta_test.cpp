// The fused operators of attention and the indexer on the Meta device: values and gradients have
// the sizes and dtypes that the reference gives on a CPU, so that a model can be planned without
// memory.
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "longhaul/ops/common.h"
#include "longhaul/ops/indexer_kl_loss/indexer_kl_loss.h"
#include "longhaul/ops/lightning_indexer/lightning_indexer.h"
#include "longhaul/ops/sparse_flash_attention/sparse_flash_attention.h"
#include "tests/ops/fused_kernels.h"
#include "tests/support/gradcheck.h"

namespace longhaul::testing {
namespace {

using ops::Kernel;

// Queries and keys of one sequence, or the last queries of it and all its keys; odd widths.
constexpr int64_t kB = 2, kL = 12, kHeads = 3, kWidth = 27, kValues = 21, kTopK = 5;

class FusedMeta : public FusedKernels<int64_t> {
 protected:
  const int64_t S_ = GetParam();
  const at::Tensor first_ = doc_start({{7, 5}, {12}}).narrow(1, kL - S_, S_);
  const at::Tensor last_ = at::arange(kL - S_, kL, at::kLong).expand({kB, S_});
  const at::Tensor chosen_ = at::where(integers({kB, S_, kTopK}, 3, 1) == 0, -1, 0).to(at::kInt);

  // `outputs(inputs, kernel)` on Meta as on the CPU; the first output has the gradients.
  static void expect_meta(const std::function<Inputs(const Inputs&, Kernel)>& outputs,
                          const Inputs& operands) {
    Inputs leaves;
    for (const auto& x : operands) {
      leaves.push_back(x.to(at::kMeta).set_requires_grad(at::isFloatingType(x.scalar_type())));
    }
    const Inputs expected = outputs(operands, Kernel::kReference);
    const Inputs actual = outputs(leaves, Kernel::kFused);
    ASSERT_EQ(actual.size(), expected.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(actual[i].is_meta()) << i;
      EXPECT_EQ(actual[i].sizes(), expected[i].sizes()) << i;
      EXPECT_EQ(actual[i].scalar_type(), expected[i].scalar_type()) << i;
    }
    if (!actual[0].requires_grad()) return;
    Inputs differentiable;
    for (const auto& x : leaves) {
      if (x.requires_grad()) differentiable.push_back(x);
    }
    const auto d = torch::autograd::grad({actual[0].sum()}, differentiable);
    for (size_t i = 0; i < d.size(); ++i) {
      EXPECT_TRUE(d[i].is_meta()) << i;
      EXPECT_EQ(d[i].sizes(), differentiable[i].sizes()) << i;
      EXPECT_EQ(d[i].scalar_type(), differentiable[i].scalar_type()) << i;
    }
  }

  // Absorbed, a row of keys and one of values for all heads, and rows of each head.
  std::vector<Inputs> attention_forms(at::ScalarType dtype) const {
    const auto make = [&](at::IntArrayRef sizes) { return normal(sizes, 1, 1, dtype); };
    const auto query = make({kB, S_, kHeads, kWidth});
    return {{query, make({kB, kL, kWidth})},
            {query, make({kB, kL, kWidth}), make({kB, kL, kValues})},
            {query, make({kB, kL, kHeads, kWidth}), make({kB, kL, kHeads, kValues})}};
  }
  Inputs indexer(at::ScalarType dtype) const {
    return {normal({kB, S_, kHeads, kWidth}, 1, 1, dtype), normal({kB, kL, kWidth}, 2, 1, dtype),
            normal({kB, S_, kHeads}, 3, 1, at::kFloat)};
  }
  static ops::AttentionOptions options(Kernel kernel) {
    return {.value_dim = kValues, .return_statistics = true, .kernel = kernel};
  }
};

at::Tensor same_device(const at::Tensor& x, const Inputs& like) { return x.to(like[0].device()); }

TEST_P(FusedMeta, DenseAttention) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const auto& operands : attention_forms(dtype)) {
      expect_meta(
          [&](const Inputs& x, Kernel kernel) -> Inputs {
            const auto r = ops::flash_attention(x[0], x[1], x.size() > 2 ? x[2] : at::Tensor(),
                                                {same_device(first_, x), same_device(last_, x)},
                                                options(kernel));
            return {r.out_BSHV, r.softmax_max, r.softmax_sum};
          },
          operands);
    }
  }
}

TEST_P(FusedMeta, SparseAttention) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const auto& operands : attention_forms(dtype)) {
      expect_meta(
          [&](const Inputs& x, Kernel kernel) -> Inputs {
            auto with_sum = options(kernel);
            with_sum.return_head_sum = true;
            const auto r = ops::sparse_flash_attention(
                x[0], x[1], x.size() > 2 ? x[2] : at::Tensor(), same_device(chosen_, x), with_sum);
            return {r.out_BSHV, r.softmax_max, r.softmax_sum, r.head_sum};
          },
          operands);
    }
  }
}

TEST_P(FusedMeta, HeadSumOfSparseAttention) {
  for (const auto& form : attention_forms(at::kBFloat16)) {
    const Inputs operands = {form[0].detach(), form[1].detach()};
    expect_meta(
        [&](const Inputs& x, Kernel) -> Inputs {
          const at::NoGradGuard no_grad;
          const auto statistics = at::ones({kB, S_, kHeads}, x[0].options().dtype(at::kFloat));
          return {ops::sparse_attention_head_sum({.query_BSHD = x[0],
                                                  .key = x[1],
                                                  .softmax_max = statistics,
                                                  .softmax_sum = statistics},
                                                 same_device(chosen_, x))};
        },
        operands);
  }
}

TEST_P(FusedMeta, LightningIndexer) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const int64_t topk : {kTopK, kL + 3}) {
      expect_meta(
          [&](const Inputs& x, Kernel kernel) -> Inputs {
            const auto r = ops::lightning_indexer(
                x[0], x[1], x[2], {same_device(first_, x), same_device(last_, x)}, topk, kernel);
            return {r.scores_BSK, r.indices_BSK};
          },
          indexer(dtype));
    }
    expect_meta(
        [&](const Inputs& x, Kernel kernel) -> Inputs {
          const at::NoGradGuard no_grad;
          const auto d =
              ops::lightning_indexer_grad({x[0], x[1], x[2]}, same_device(chosen_, x),
                                          at::zeros(chosen_.sizes(), x[2].options()), kernel);
          return {d.query_BSHD, d.key_BSD, d.weights_BSH};
        },
        indexer(dtype));
  }
}

TEST_P(FusedMeta, IndexerLosses) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    expect_meta(
        [&](const Inputs& x, Kernel kernel) -> Inputs {
          const auto head_sum = at::ones(chosen_.sizes(), x[2].options());
          return {ops::sparse_indexer_kl_loss({x[0], x[1], x[2]}, same_device(chosen_, x), head_sum,
                                              kernel)};
        },
        indexer(dtype));
    for (const auto& form : attention_forms(dtype)) {
      expect_meta(
          [&](const Inputs& x, Kernel kernel) -> Inputs {
            const auto statistics = at::ones({kB, S_, kHeads}, x[2].options());
            const ops::AttentionState state = {.query_BSHD = form[0].to(x[0].device()),
                                               .key = form[1].to(x[0].device()),
                                               .softmax_max = statistics,
                                               .softmax_sum = statistics};
            const auto range =
                ops::KeyRange(same_device(doc_start({{7, 5}, {12}}), x)).of_queries(kL - S_, S_);
            return {
                ops::dense_indexer_kl_loss({x[0], x[1], x[2]}, state, range, {.kernel = kernel})};
          },
          indexer(dtype));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Queries, FusedMeta, ::testing::Values(kL, 5));

}  // namespace
}  // namespace longhaul::testing
