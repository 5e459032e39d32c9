// The fused kernels of sparse attention against the fp64 reference, forward and backward, for the
// instruction set that LONGHAUL_ISA names (ctest runs this once for each): odd and extreme shapes,
// ties, gaps in the indices, documents, and the same bits on any number of threads.
#include <ATen/Parallel.h>
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

struct Case {
  const char* name;
  std::vector<std::vector<int64_t>> documents;
  int64_t H, C, R, K;  // of the attention: heads, latent, rope
  int64_t Hi, Di;      // of the indexer
};

const Case kCases[] = {
    {"one slot", {{1}}, 1, 32, 0, 1, 1, 32},
    {"one head, one key", {{9}}, 1, 32, 32, 1, 1, 32},
    {"K beyond S", {{7}, {7}}, 2, 32, 32, 40, 3, 64},
    {"odd dims", {{37}}, 3, 21, 6, 5, 5, 22},
    {"8 heads", {{70}}, 8, 64, 32, 33, 8, 64},
    {"9 heads", {{41}}, 9, 32, 32, 17, 9, 32},
    {"16 heads", {{41, 30}}, 16, 64, 64, 19, 16, 32},
    {"40 heads, 64 index heads", {{50}}, 40, 32, 64, 35, 64, 128},
    {"128 heads", {{6}}, 128, 32, 32, 4, 64, 32},
    {"documents of length 1", {{1, 1, 4, 1, 60}}, 4, 32, 32, 5, 4, 32},
    {"packed and padded", {{25, 24, -2}, {-3, 40, 8}}, 4, 64, 32, 9, 2, 32},
    {"only padding", {{-4}}, 2, 32, 32, 3, 2, 32},
    {"several blocks of keys", {{300}}, 8, 32, 32, 150, 8, 32},
    // Sums over queries in several superblocks (row_scatter.h).
    {"more than a superblock", {{300}}, 64, 32, 32, 200, 64, 32},
};

struct Inputs4 {
  at::Tensor query, key, index_query, index_key, index_weights, starts;
};

// How the attention gets its keys and values: shared by the heads, the first C columns of the keys
// being the values; or each head's own, values of C columns, or of C + 2R between other columns.
enum class Form { kAbsorbed, kExpanded, kExpandedView };
constexpr Form kForms[] = {Form::kAbsorbed, Form::kExpanded, Form::kExpandedView};

class FusedDsa : public FusedKernels<at::ScalarType> {
 protected:
  static at::ScalarType dtype() { return GetParam(); }
  // Operands are exact in both; what is left is fp32 accumulation, or bf16 rounding of P, dS and
  // results.
  static double limit() { return dtype() == at::kFloat ? 3e-6 : 6e-3; }
  // The same of gradients of the indexer's operands, as a share of kSmall at least.
  static double index_limit() { return dtype() == at::kFloat ? 2e-5 : 3e-2; }

  static Inputs4 inputs(const Case& c) {
    const auto starts = doc_start(c.documents);
    const int64_t B = starts.size(0), S = starts.size(1), D = c.C + c.R;
    return {normal({B, S, c.H, D}, 1, 1, dtype()),     normal({B, S, D}, 2, 1, dtype()),
            normal({B, S, c.Hi, c.Di}, 3, 1, dtype()), normal({B, S, c.Di}, 4, 1, dtype()),
            normal({B, S, c.Hi}, 5, 0.3, at::kFloat),  starts};
  }

  // Query, key and, if expanded, value.
  static Inputs attention_operands(const Case& c, const Inputs4& in, Form form) {
    if (form == Form::kAbsorbed) return {in.query, in.key};
    const int64_t B = in.query.size(0), S = in.query.size(1);
    const auto key = normal({B, S, c.H, c.C + c.R}, 2, 1, dtype());
    if (form == Form::kExpanded) return {in.query, key, normal({B, S, c.H, c.C}, 12, 1, dtype())};
    const int64_t V = c.C + 2 * c.R;
    return {in.query, key, normal({B, S, c.H, V + 9}, 12, 1, dtype()).narrow(3, 5, V)};
  }

  // Random visible keys, -1 in the middle of rows too.
  static at::Tensor indices(const at::Tensor& starts, int64_t K) {
    const int64_t B = starts.size(0), S = starts.size(1);
    const auto mask = ops::visible_mask(starts).logical_and(normal({B, S, S}, 6) > -0.5);
    const auto all = ops::mask_to_indices(mask, S).narrow(2, 0, std::min(K, S));
    const auto gaps = (normal(all.sizes(), 7) > 1.2) & (at::arange(S).unsqueeze(1) % 2 == 0);
    return at::where(gaps, at::full_like(all, -1), all).contiguous();
  }
};

ops::AttentionOptions options(const Case& c, Kernel kernel) {
  return {.scale = 0.3,
          .value_dim = c.C,
          .return_head_sum = true,
          .return_statistics = true,
          .kernel = kernel};
}

ops::AttentionResult attend(const Inputs& x, const at::Tensor& chosen,
                            const ops::AttentionOptions& options) {
  return ops::sparse_flash_attention(x[0], x[1], x.size() > 2 ? x[2] : at::Tensor(), chosen,
                                     options);
}

// Of the scale in options().
at::Tensor head_sum_again(const Inputs& x, const ops::AttentionResult& result,
                          const at::Tensor& chosen) {
  return ops::sparse_attention_head_sum({.query_BSHD = x[0],
                                         .key = x[1],
                                         .softmax_max = result.softmax_max,
                                         .softmax_sum = result.softmax_sum,
                                         .scale = 0.3},
                                        chosen);
}

// The operands in that dtype.
Inputs as_leaves(const Inputs& operands, at::ScalarType type) {
  Inputs leaves;
  for (const auto& x : operands) leaves.push_back(x.detach().to(type).set_requires_grad(true));
  return leaves;
}

TEST_P(FusedDsa, AttentionAndItsGradients) {
  for (const auto& c : kCases) {
    for (const Form form : kForms) {
      SCOPED_TRACE(::testing::Message() << c.name << ", form " << static_cast<int>(form));
      const auto in = inputs(c);
      const auto operands = attention_operands(c, in, form);
      const auto chosen = indices(in.starts, c.K);
      const auto run = [&](at::ScalarType type, Kernel kernel) {
        const Inputs leaves = as_leaves(operands, type);
        const auto result = attend(leaves, chosen, options(c, kernel));
        const auto d_out = normal(result.out_BSHV.sizes(), 8, 1, dtype()).to(type);
        auto grads = torch::autograd::grad({(result.out_BSHV * d_out).sum()}, leaves);
        return std::make_pair(result, grads);
      };
      const auto [expected, d_expected] = run(at::kDouble, Kernel::kReference);
      const auto [actual, d_actual] = run(dtype(), Kernel::kFused);
      EXPECT_EQ(actual.out_BSHV.scalar_type(), dtype());
      EXPECT_LT(frobenius(actual.out_BSHV, expected.out_BSHV), limit());
      EXPECT_LT(frobenius(actual.softmax_max, expected.softmax_max), 2e-6);
      EXPECT_LT(frobenius(actual.softmax_sum, expected.softmax_sum), 3e-6);
      EXPECT_LT(frobenius(actual.head_sum, expected.head_sum, kSmall), 3e-5);
      for (size_t i = 0; i < operands.size(); ++i) {
        EXPECT_LT(frobenius(d_actual[i], d_expected[i]), limit()) << "gradient " << i;
      }
    }
  }
}

// Products of small integers are exact in every dtype and tie all the time.
TEST_P(FusedDsa, SelectionWithTies) {
  for (const auto& c : kCases) {
    const auto starts = doc_start(c.documents);
    const int64_t B = starts.size(0), S = starts.size(1);
    const auto small = [](at::IntArrayRef sizes, int64_t end, uint64_t seed) {
      return (integers(sizes, end, seed) - end / 2).to(dtype());
    };
    const auto q = small({B, S, c.Hi, c.Di}, 3, 1), k = small({B, S, c.Di}, 3, 2);
    const auto w = small({B, S, c.Hi}, 4, 3).to(at::kFloat) * 0.5;
    const auto expected = ops::lightning_indexer(q.to(at::kDouble), k.to(at::kDouble),
                                                 w.to(at::kDouble), starts, c.K);
    const auto actual = ops::lightning_indexer(q, k, w, starts, c.K, Kernel::kFused);
    EXPECT_TRUE(at::equal(actual.indices_BSK, expected.indices_BSK)) << c.name;
    EXPECT_TRUE(at::equal(actual.scores_BSK.to(at::kDouble), expected.scores_BSK)) << c.name;
  }
}

TEST_P(FusedDsa, SelectionOfRandomAndEqualScores) {
  for (const int64_t K : {1, 7, 64, 700}) {
    for (const double std : {1.0, 0.0}) {
      const auto starts = doc_start({{1500, 37}});
      const auto q = normal({1, 1537, 3, 32}, 1, std, dtype());
      const auto k = normal({1, 1537, 32}, 2, 1, dtype());
      const auto w = normal({1, 1537, 3}, 3, 0.3, at::kFloat);
      const auto expected = ops::lightning_indexer(q.to(at::kDouble), k.to(at::kDouble),
                                                   w.to(at::kDouble), starts, K);
      const auto actual = ops::lightning_indexer(q, k, w, starts, K, Kernel::kFused);
      // fp32 may order two scores differently that nearly tie: a few rows of 1537 at most.
      const auto rows = (actual.indices_BSK != expected.indices_BSK).any(-1).sum();
      EXPECT_LE(rows.item<int64_t>(), std == 0 ? 0 : 8) << K;
      EXPECT_LT(frobenius(actual.scores_BSK, expected.scores_BSK, kSmall), 3e-5) << K;
    }
  }
}

// So many that the threshold rises while they come, with ties across it and with scores so large
// that the middle of their range tells nothing.
TEST_P(FusedDsa, SelectionOfOutliersAndTies) {
  constexpr int64_t kKeys = 1200;
  for (const int64_t K : {64, 300}) {
    for (const double sign : {1.0, -1.0}) {
      auto values = integers({kKeys}, 10, 1).to(dtype());
      values.slice(0, 30, kKeys, 97).fill_(1e30);
      if (sign > 0) values.slice(0, 40, kKeys, 301).fill_(INFINITY);
      auto q = at::zeros({1, kKeys, 8, 32}, dtype()), k = at::zeros({1, kKeys, 32}, dtype());
      q.select(3, 0).fill_(1);
      k.select(2, 0).copy_(values);
      const auto w = at::full({1, kKeys, 8}, sign / 8, at::kFloat);
      const auto starts = doc_start({{kKeys}});
      const auto expected = ops::lightning_indexer(q.to(at::kDouble), k.to(at::kDouble),
                                                   w.to(at::kDouble), starts, K);
      const auto actual = ops::lightning_indexer(q, k, w, starts, K, Kernel::kFused);
      EXPECT_TRUE(at::equal(actual.indices_BSK, expected.indices_BSK)) << K << " " << sign;
    }
  }
}

TEST_P(FusedDsa, SelectionOfNanAndInfinity) {
  const auto starts = doc_start({{40}});
  auto q = normal({1, 40, 1, 32}, 1, 1, dtype()), k = at::ones({1, 40, 32}, dtype());
  const auto w = at::ones({1, 40, 1}, at::kFloat);
  q.fill_(1);
  k.select(1, 5).fill_(NAN);
  k.select(1, 7).fill_(INFINITY);
  const auto chosen = ops::lightning_indexer(q, k, w, starts, 2, Kernel::kFused);
  EXPECT_TRUE(at::equal(chosen.indices_BSK[0][39], at::tensor({5, 7}, at::kInt)));
  const auto none = ops::lightning_indexer(q, k, -w, starts, 40, Kernel::kFused);
  EXPECT_TRUE(at::equal(none.indices_BSK[0][39], at::arange(40, at::kInt)));
}

TEST_P(FusedDsa, IndexerLossAndItsGradients) {
  for (const auto& c : kCases) {
    const auto in = inputs(c);
    const auto chosen = indices(in.starts, c.K);
    auto head_sum = normal(chosen.sizes(), 9).exp();
    head_sum.masked_fill_(normal(chosen.sizes(), 10) > 1, 0);  // p = 0 contributes 0
    head_sum.masked_fill_(chosen < 0, NAN);                    // what stands at gaps does not count
    const auto scores =
        ops::indexer_scores(in.index_query.to(at::kDouble), in.index_key.to(at::kDouble),
                            in.index_weights.to(at::kDouble))
            .gather(2, chosen.to(at::kLong).clamp_min(0))
            .to(at::kFloat);
    const auto run = [&](at::ScalarType type, Kernel kernel, const at::Tensor& known) {
      const auto wide = type == at::kDouble ? at::kDouble : at::kFloat;
      Inputs leaves = {in.index_query.to(type).set_requires_grad(true),
                       in.index_key.to(type).set_requires_grad(true),
                       in.index_weights.to(wide).set_requires_grad(true)};
      const auto loss = ops::sparse_indexer_kl_loss({leaves[0], leaves[1], leaves[2]}, chosen,
                                                    head_sum.to(wide), kernel, known);
      return std::make_pair(loss, torch::autograd::grad({loss}, leaves));
    };
    const auto [expected, d_expected] = run(at::kDouble, Kernel::kReference, {});
    for (const auto& known : {at::Tensor(), scores}) {
      const auto [actual, d_actual] = run(dtype(), Kernel::kFused, known);
      EXPECT_LT(frobenius(actual, expected, kSmall), 3e-5) << c.name;
      EXPECT_LT(frobenius(d_actual[0], d_expected[0], kSmall), index_limit()) << c.name << " query";
      EXPECT_LT(frobenius(d_actual[1], d_expected[1], kSmall), index_limit()) << c.name << " key";
      EXPECT_LT(frobenius(d_actual[2], d_expected[2], kSmall), 1e-4) << c.name << " weights";
    }
  }
}

TEST_P(FusedDsa, HeadSumFromSavedStatistics) {
  for (const auto& c : kCases) {
    for (const Form form : kForms) {
      SCOPED_TRACE(::testing::Message() << c.name << ", form " << static_cast<int>(form));
      const auto in = inputs(c);
      const auto operands = attention_operands(c, in, form);
      const auto chosen = indices(in.starts, c.K);
      const auto run = [&](at::ScalarType type, Kernel kernel) {
        const Inputs leaves = as_leaves(operands, type);
        const auto result = attend(leaves, chosen, options(c, kernel));
        return std::pair(result.head_sum, head_sum_again(leaves, result, chosen));
      };
      const auto [expected, of_reference] = run(at::kDouble, Kernel::kReference);
      EXPECT_LT(frobenius(of_reference, expected, kSmall), 1e-13);
      const auto actual = run(dtype(), Kernel::kFused).second;
      EXPECT_EQ(actual.scalar_type(), at::kFloat);
      EXPECT_LT(frobenius(actual, expected, kSmall), 3e-5);
    }
  }
}

TEST_P(FusedDsa, GradientOfTheIndexScores) {
  for (const auto& c : kCases) {
    const auto in = inputs(c);
    const auto chosen = indices(in.starts, c.K);
    const auto d_scores = normal(chosen.sizes(), 9, 1, at::kFloat);
    const auto gradient = [&](at::ScalarType type, Kernel kernel) {
      const auto wide = type == at::kDouble ? at::kDouble : at::kFloat;
      return ops::lightning_indexer_grad(
          {in.index_query.to(type), in.index_key.to(type), in.index_weights.to(wide)}, chosen,
          d_scores.to(wide), kernel);
    };
    const auto expected = gradient(at::kDouble, Kernel::kReference);
    const auto actual = gradient(dtype(), Kernel::kFused);
    EXPECT_LT(frobenius(actual.query_BSHD, expected.query_BSHD, kSmall), index_limit()) << c.name;
    EXPECT_LT(frobenius(actual.key_BSD, expected.key_BSD, kSmall), index_limit()) << c.name;
    EXPECT_LT(frobenius(actual.weights_BSH, expected.weights_BSH, kSmall), 1e-4) << c.name;
  }
}

// Gaps at the beginning, in the middle and at the end of rows: what stands for no key must not be
// taken for key 0, which no query has chosen. It holds NaN, and gets exactly nothing.
TEST_P(FusedDsa, GapsAreNotKey0) {
  const Case c{"", {{200}}, 9, 32, 32, 40, 5, 32};
  auto in = inputs(c);
  auto chosen = indices(in.starts, c.K);
  chosen = at::where(chosen == 0, at::full_like(chosen, -1), chosen);
  for (const int64_t place : {int64_t{0}, c.K / 2, c.K - 1}) chosen.select(2, place).fill_(-1);
  in.key.select(1, 0).fill_(NAN);
  in.index_key.select(1, 0).fill_(NAN);
  at::Tensor head_sum;
  const auto expect_nothing = [](const at::Tensor& d_key, const std::string& what) {
    EXPECT_TRUE((d_key.select(1, 0) == 0).all().item<bool>()) << what;
    EXPECT_TRUE(d_key.isfinite().all().item<bool>()) << what;
    EXPECT_GT(d_key.abs().max().item<double>(), 0) << what;
  };
  for (const Form form : kForms) {
    auto operands = attention_operands(c, in, form);
    for (size_t i = 1; i < operands.size(); ++i) operands[i].select(1, 0).fill_(NAN);
    const Inputs leaves = as_leaves(operands, dtype());
    const auto result = attend(leaves, chosen, options(c, Kernel::kFused));
    EXPECT_TRUE(result.out_BSHV.isfinite().all().item<bool>());
    EXPECT_TRUE((result.head_sum.masked_select(chosen < 0) == 0).all().item<bool>());
    const auto d = torch::autograd::grad({result.out_BSHV.square().sum()}, leaves);
    EXPECT_TRUE(d[0].isfinite().all().item<bool>());
    for (size_t i = 1; i < d.size(); ++i) expect_nothing(d[i], "operand " + std::to_string(i));
    head_sum = result.head_sum;
    const auto again = head_sum_again(operands, result, chosen);
    EXPECT_TRUE(again.isfinite().all().item<bool>());
    EXPECT_TRUE((again.masked_select(chosen < 0) == 0).all().item<bool>());
    EXPECT_GT(again.max().item<double>(), 0);
  }
  Inputs index = {in.index_query, in.index_key, in.index_weights};
  for (auto& x : index) x = x.detach().set_requires_grad(true);
  const auto loss =
      ops::sparse_indexer_kl_loss({index[0], index[1], index[2]}, chosen, head_sum, Kernel::kFused);
  EXPECT_TRUE(loss.isfinite().item<bool>());
  expect_nothing(torch::autograd::grad({loss}, index)[1], "loss");
  const auto d_scores = normal(chosen.sizes(), 9, 1, at::kFloat);  // not 0 at the gaps
  expect_nothing(ops::lightning_indexer_grad({in.index_query, in.index_key, in.index_weights},
                                             chosen, d_scores, Kernel::kFused)
                     .key_BSD,
                 "index scores");
}

// Where the indexer has learnt its target the loss is far smaller than its terms.
TEST_P(FusedDsa, IndexerLossNearItsMinimum) {
  const Case c{"", {{80}}, 1, 32, 0, 40, 4, 32};
  const auto in = inputs(c);
  const auto chosen = ops::mask_to_indices(ops::visible_mask(in.starts), 80);
  const auto scores =
      ops::indexer_scores(in.index_query.to(at::kDouble), in.index_key.to(at::kDouble),
                          in.index_weights.to(at::kDouble))
          .gather(2, chosen.to(at::kLong).clamp_min(0));
  const auto target = (scores + 1e-3 * normal(scores.sizes(), 11)).exp().masked_fill(chosen < 0, 0);
  const auto loss = [&](at::ScalarType type, Kernel kernel) {
    const auto wide = type == at::kDouble ? at::kDouble : at::kFloat;
    return ops::sparse_indexer_kl_loss(
               {in.index_query.to(type), in.index_key.to(type), in.index_weights.to(wide)}, chosen,
               target.to(wide), kernel)
        .item<double>();
  };
  const double expected = loss(at::kDouble, Kernel::kReference);
  EXPECT_LT(expected, 1e-4);
  // Scores of size 10 are off by 4e-6, 0.4% of what separates the distributions.
  EXPECT_NEAR(loss(dtype(), Kernel::kFused) / expected, 1, 1e-2);
}

// A negative scale must not let gaps in.
TEST_P(FusedDsa, NegativeScale) {
  const Case c{"", {{40, 30}}, 2, 32, 32, 9, 1, 32};
  const auto in = inputs(c);
  const auto chosen = indices(in.starts, c.K);
  for (const Form form : kForms) {
    const auto operands = attention_operands(c, in, form);
    const auto run = [&](at::ScalarType type, Kernel kernel) {
      const Inputs leaves = as_leaves(operands, type);
      auto negative = options(c, kernel);
      negative.scale = -0.2;
      const auto result = attend(leaves, chosen, negative);
      const auto d_out = normal(result.out_BSHV.sizes(), 8, 1, dtype()).to(type);
      auto all = torch::autograd::grad({(result.out_BSHV * d_out).sum()}, leaves);
      all.push_back(result.out_BSHV);
      all.push_back(result.head_sum);
      return all;
    };
    const auto expected = run(at::kDouble, Kernel::kReference);
    const auto actual = run(dtype(), Kernel::kFused);
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_LT(frobenius(actual[i], expected[i]), limit())
          << i << ", form " << static_cast<int>(form);
    }
  }
}

TEST_P(FusedDsa, ThreadsDoNotChangeABit) {
  // Rows of several superblocks each (row_scatter.h).
  const Case c{"", {{300, 220}, {520}}, 32, 64, 32, 100, 32, 64};
  const auto in = inputs(c);
  std::vector<at::Tensor> first;
  const int before = at::get_num_threads();
  for (const int threads : {1, 2, 3}) {
    at::set_num_threads(threads);
    const auto chosen = ops::lightning_indexer(in.index_query, in.index_key, in.index_weights,
                                               in.starts, c.K, Kernel::kFused);
    Inputs leaves = {in.query.detach().set_requires_grad(true),
                     in.key.detach().set_requires_grad(true),
                     in.index_query.detach().set_requires_grad(true),
                     in.index_key.detach().set_requires_grad(true),
                     in.index_weights.detach().set_requires_grad(true)};
    const auto result = ops::sparse_flash_attention(leaves[0], leaves[1], {}, chosen.indices_BSK,
                                                    options(c, Kernel::kFused));
    const auto loss =
        ops::sparse_indexer_kl_loss({leaves[2], leaves[3], leaves[4]}, chosen.indices_BSK,
                                    result.head_sum, Kernel::kFused, chosen.scores_BSK);
    std::vector<at::Tensor> all =
        torch::autograd::grad({result.out_BSHV.to(at::kFloat).square().sum() + loss}, leaves);
    const auto of_scores =
        ops::lightning_indexer_grad({in.index_query, in.index_key, in.index_weights},
                                    chosen.indices_BSK, result.head_sum, Kernel::kFused);
    const auto head_sum = head_sum_again({in.query, in.key}, result, chosen.indices_BSK);
    for (const auto& x : {chosen.indices_BSK, chosen.scores_BSK, result.out_BSHV.detach(),
                          result.head_sum, loss.detach(), of_scores.query_BSHD, of_scores.key_BSD,
                          of_scores.weights_BSH, head_sum}) {
      all.push_back(x);
    }
    const Inputs expanded = as_leaves(attention_operands(c, in, Form::kExpanded), dtype());
    const auto by_head = attend(expanded, chosen.indices_BSK, options(c, Kernel::kFused));
    for (const auto& x :
         torch::autograd::grad({by_head.out_BSHV.to(at::kFloat).square().sum()}, expanded)) {
      all.push_back(x);
    }
    for (const auto& x : {by_head.out_BSHV.detach(), by_head.softmax_sum, by_head.head_sum,
                          head_sum_again(expanded, by_head, chosen.indices_BSK)}) {
      all.push_back(x);
    }
    if (first.empty()) first = all;
    for (size_t i = 0; i < all.size(); ++i) EXPECT_TRUE(at::equal(all[i], first[i])) << i;
  }
  at::set_num_threads(before);
}

INSTANTIATE_TEST_SUITE_P(Dtypes, FusedDsa, ::testing::Values(at::kFloat, at::kBFloat16));

}  // namespace
}  // namespace longhaul::testing
