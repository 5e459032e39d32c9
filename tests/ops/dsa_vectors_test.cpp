// The operators against reference vectors of sparse and dense attention with the indexer loss
// (tests/golden/README.md, dsa_unit): out, log-sum-exp, KL and every gradient.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "longhaul/ops/indexer_kl_loss/indexer_kl_loss.h"
#include "longhaul/ops/lightning_indexer/lightning_indexer.h"
#include "longhaul/ops/sparse_flash_attention/sparse_flash_attention.h"
#include "tests/support/golden.h"
#include "tests/support/gradcheck.h"

namespace longhaul::testing {
namespace {

constexpr double kTolerance = 2e-6;  // of each tensor's maximum
// The reference adds 1e-8 to p and r before it takes logarithms, which shows where a hundred keys
// share a row: 4.9e-6 of the gradients in fp32 and fp64 alike. DenseWithTheReferencesEpsilon adds
// the same and holds the tolerance above.
constexpr double kDenseIndexerTolerance = 6e-6;
constexpr double kKlTolerance = 3e-6;  // relative

// The files have heads before positions.
at::Tensor swap_heads(const at::Tensor& x) { return x.transpose(1, 2).contiguous(); }

class DsaVectors : public ::testing::TestWithParam<std::tuple<int, at::ScalarType, ops::Kernel>> {
 protected:
  DsaVectors() : file_(load_golden("dsa_unit_" + std::to_string(number()) + ".safetensors")) {
    for (const auto* name : {"q", "k", "v"}) leaves_[name] = swap_heads(file_.at(name));
    for (const auto* name : {"index_q", "index_k", "index_w"}) leaves_[name] = file_.at(name);
    for (auto& [name, leaf] : leaves_) leaf = leaf.to(dtype()).set_requires_grad(true);
    options_ = {.scale = file_.at("scale").item<double>(),
                .return_head_sum = true,
                .return_statistics = true,
                .kernel = kernel()};
    starts_ = at::zeros({leaves_["q"].size(0), leaves_["q"].size(1)}, at::kLong);
  }

  int number() const { return std::get<0>(GetParam()); }
  at::ScalarType dtype() const { return std::get<1>(GetParam()); }
  ops::Kernel kernel() const { return std::get<2>(GetParam()); }

  ops::IndexerInputs indexer() {
    return {leaves_["index_q"], leaves_["index_k"], leaves_["index_w"]};
  }

  // Queries of the global batch: the vectors' KL is a mean.
  double queries() const { return static_cast<double>(starts_.numel()); }

  // sum of p (log(p + 1e-8) - log(r + 1e-8)) over the causal positions, as the reference has it.
  at::Tensor kl_with_epsilon(const at::Tensor& head_sum) {
    const auto in = indexer();
    const auto hidden = at::ones({starts_.size(1), starts_.size(1)}, at::kBool).triu(1);
    const auto dots = at::einsum("bthd,bsd->bths", {in.query_BSHD, in.key_BSD}).relu();
    const auto scores = (dots * in.weights_BSH.unsqueeze(-1)).sum(2);
    const auto r = scores.masked_fill(hidden, -INFINITY).softmax(-1);
    const auto p = (head_sum / head_sum.sum(-1, true)).detach();
    return (p * ((p + 1e-8).log() - (r + 1e-8).log())).sum();
  }

  void compare(const std::string& mode, const ops::AttentionResult& result, const at::Tensor& kl,
               double indexer_tolerance = kTolerance) {
    torch::autograd::backward(
        {(result.out_BSHV * swap_heads(file_.at("d_out"))).sum() + kl / queries()}, {});
    EXPECT_LT(relative_to_max(result.out_BSHV, swap_heads(file_.at(mode + ".out"))), kTolerance);
    EXPECT_LT(relative_to_max(result.softmax_max + result.softmax_sum.log(),
                              swap_heads(file_.at(mode + ".lse"))),
              kTolerance);
    EXPECT_NEAR(kl.item<double>() / queries() / file_.at(mode + ".loss").item<double>(), 1.0,
                kKlTolerance);
    size_t compared = 0;
    for (const auto& [name, leaf] : leaves_) {
      const bool index = name.size() > 1;
      const auto found = file_.find(mode + (index ? ".d_" : ".d") + name);
      if (found == file_.end()) continue;  // case 2 has no dense attention gradients
      const auto expected = index ? found->second : swap_heads(found->second);
      EXPECT_LT(relative_to_max(leaf.grad(), expected), index ? indexer_tolerance : kTolerance)
          << name;
      ++compared;
    }
    EXPECT_EQ(compared, number() == 2 && mode == "dense" ? 3U : 6U);
  }

  Tensors file_;
  std::map<std::string, at::Tensor> leaves_;
  ops::AttentionOptions options_;
  at::Tensor starts_;
};

TEST_P(DsaVectors, ScoresAndSelection) {
  const auto in = indexer();
  const auto causal = at::ones({starts_.size(1), starts_.size(1)}, at::kBool).tril();
  const auto scores = ops::indexer_scores(in.query_BSHD, in.key_BSD, in.weights_BSH) * causal;
  EXPECT_LT(relative_to_max(scores, file_.at("index_scores") * causal), kTolerance);
  const auto selection = ops::lightning_indexer(in.query_BSHD, in.key_BSD, in.weights_BSH, starts_,
                                                file_.at("topk").item<int64_t>(), kernel());
  const auto chosen = selection.indices_BSK.to(at::kLong);
  const auto expected = file_.at("index_scores").gather(-1, chosen.clamp_min(0));
  EXPECT_LT(relative_to_max(selection.scores_BSK.masked_fill(chosen < 0, 0),
                            expected.masked_fill(chosen < 0, 0)),
            kTolerance);
  const int64_t S = starts_.size(1);
  EXPECT_TRUE(at::equal(ops::indices_to_mask(selection.indices_BSK, S),
                        ops::indices_to_mask(file_.at("sparse.topk_indices"), S)));
}

TEST_P(DsaVectors, Sparse) {
  // The file's order is by falling score, ours ascending: neither may matter.
  const auto indices = file_.at("sparse.topk_indices");
  const auto result =
      ops::sparse_flash_attention(leaves_["q"], leaves_["k"], leaves_["v"], indices, options_);
  compare("sparse", result,
          ops::sparse_indexer_kl_loss(indexer(), indices, result.head_sum, kernel()));
}

TEST_P(DsaVectors, Dense) {
  const auto result =
      ops::flash_attention(leaves_["q"], leaves_["k"], leaves_["v"], starts_, options_);
  compare("dense", result, ops::dense_indexer_kl_loss(indexer(), starts_, result.head_sum),
          kDenseIndexerTolerance);
}

TEST_P(DsaVectors, DenseWithTheReferencesEpsilon) {
  const auto result =
      ops::flash_attention(leaves_["q"], leaves_["k"], leaves_["v"], starts_, options_);
  compare("dense", result, kl_with_epsilon(result.head_sum));
}

// As the model does it: the loss makes the head sum itself, block by block.
TEST_P(DsaVectors, DenseInBlocks) {
  options_.return_head_sum = false;
  const auto result =
      ops::flash_attention(leaves_["q"], leaves_["k"], leaves_["v"], starts_, options_);
  const auto loss = ops::dense_indexer_kl_loss(indexer(),
                                               {.query_BSHD = leaves_["q"],
                                                .key = leaves_["k"],
                                                .softmax_max = result.softmax_max,
                                                .softmax_sum = result.softmax_sum,
                                                .scale = options_.scale},
                                               starts_, {.kernel = kernel()});
  compare("dense", result, loss, kDenseIndexerTolerance);
}

INSTANTIATE_TEST_SUITE_P(Cases, DsaVectors,
                         ::testing::Combine(::testing::Values(0, 1, 2),
                                            ::testing::Values(at::kFloat, at::kDouble),
                                            ::testing::Values(ops::Kernel::kReference)));

INSTANTIATE_TEST_SUITE_P(Fused, DsaVectors,
                         ::testing::Combine(::testing::Values(0, 1, 2),
                                            ::testing::Values(at::kFloat),
                                            ::testing::Values(ops::Kernel::kFused)));

}  // namespace
}  // namespace longhaul::testing
