// The fused kernels of dense attention against the fp64 reference, forward and backward, for the
// instruction set that LONGHAUL_ISA names (ctest runs this once for each): absorbed and expanded,
// odd and extreme shapes, documents, and the same bits on any number of threads.
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "longhaul/ops/common.h"
#include "longhaul/ops/flash_attention/head_sum.h"
#include "longhaul/ops/indexer_kl_loss/indexer_kl_loss.h"
#include "tests/ops/fused_kernels.h"
#include "tests/support/gradcheck.h"

namespace longhaul::testing {
namespace {

using ops::Kernel;

// How keys and values are given: one row for all heads that is both, one of each, or rows by head.
enum class Form { kAbsorbed, kShared, kExpanded };
constexpr Form kForms[] = {Form::kAbsorbed, Form::kShared, Form::kExpanded};

struct Case {
  const char* name;
  std::vector<std::vector<int64_t>> documents;
  int64_t H, D, V;
  int64_t Hi = 1, Di = 32;  // of the indexer
};

const Case kCases[] = {
    {"one slot", {{1}}, 1, 32, 32, 1, 32},
    {"one head", {{9}}, 1, 64, 32, 1, 64},
    {"odd dims", {{37}, {37}}, 3, 27, 21, 5, 22},
    {"more than a group", {{33}}, 2, 96, 64, 8, 64},
    {"two blocks, 192/128", {{150}}, 2, 192, 128, 3, 128},
    {"values as wide as keys", {{70}}, 4, 64, 64, 9, 32},
    {"128 heads, 64 index heads", {{6}}, 128, 64, 32, 64, 128},
    {"documents of length 1", {{1, 1, 4, 1, 60}}, 4, 64, 32, 4, 32},
    {"packed and padded", {{25, 24, -2}, {-3, 40, 8}}, 4, 96, 64, 2, 32},
    {"only padding", {{-4}}, 2, 32, 32},
    {"several blocks and documents", {{90, 210, 1, 99}}, 3, 64, 32, 6, 32},
};

Inputs operands(const Case& c, Form form, at::ScalarType dtype, double query_std = 1) {
  const auto starts = doc_start(c.documents);
  const int64_t B = starts.size(0), S = starts.size(1);
  Inputs all = {normal({B, S, c.H, c.D}, 1, query_std, dtype)};
  if (form == Form::kExpanded) {
    all.push_back(normal({B, S, c.H, c.D}, 2, 1, dtype));
    all.push_back(normal({B, S, c.H, c.V}, 3, 1, dtype));
  } else {
    all.push_back(normal({B, S, c.D}, 2, 1, dtype));
    if (form == Form::kShared) all.push_back(normal({B, S, c.V}, 3, 1, dtype));
  }
  return all;
}

ops::AttentionOptions options(const Case& c, Kernel kernel) {
  return {.scale = 0.3, .value_dim = c.V, .return_statistics = true, .kernel = kernel};
}

struct Evaluated2 {
  ops::AttentionResult result;
  Inputs gradients;
};

Evaluated2 attend(const Case& c, const Inputs& inputs, at::ScalarType type, Kernel kernel,
                  const at::Tensor& d_out) {
  Inputs leaves;
  for (const auto& x : inputs) leaves.push_back(x.to(type).detach().set_requires_grad(true));
  const auto value = leaves.size() > 2 ? leaves[2] : at::Tensor();
  const auto result =
      ops::flash_attention(leaves[0], leaves[1], value, doc_start(c.documents), options(c, kernel));
  return {result, torch::autograd::grad({(result.out_BSHV * d_out.to(type)).sum()}, leaves)};
}

class FusedDense : public FusedKernels<at::ScalarType> {
 protected:
  static at::ScalarType dtype() { return GetParam(); }
  // Operands are exact in both; what is left is fp32 accumulation, or bf16 rounding of P, dS and
  // results.
  static double limit() { return dtype() == at::kFloat ? 3e-6 : 6e-3; }
  // The same of gradients of the indexer's operands, as a share of kSmall at least.
  static double index_limit() { return dtype() == at::kFloat ? 2e-5 : 3e-2; }

  static at::Tensor d_out(const Case& c) {
    const auto starts = doc_start(c.documents);
    return normal({starts.size(0), starts.size(1), c.H, c.V}, 8, 1, dtype());
  }
};

TEST_P(FusedDense, AttentionAndItsGradients) {
  for (const auto& c : kCases) {
    for (const Form form : kForms) {
      SCOPED_TRACE(::testing::Message() << c.name << ", form " << static_cast<int>(form));
      const auto in = operands(c, form, dtype());
      const auto expected = attend(c, in, at::kDouble, Kernel::kReference, d_out(c));
      const auto actual = attend(c, in, dtype(), Kernel::kFused, d_out(c));
      EXPECT_EQ(actual.result.out_BSHV.scalar_type(), dtype());
      EXPECT_LT(frobenius(actual.result.out_BSHV, expected.result.out_BSHV), limit());
      EXPECT_LT(frobenius(actual.result.softmax_max, expected.result.softmax_max), 2e-6);
      EXPECT_LT(frobenius(actual.result.softmax_sum, expected.result.softmax_sum), 3e-6);
      for (size_t i = 0; i < in.size(); ++i) {
        EXPECT_EQ(actual.gradients[i].sizes(), in[i].sizes());
        EXPECT_LT(frobenius(actual.gradients[i], expected.gradients[i]), limit()) << i;
      }
    }
  }
}

struct Indexer {
  Inputs operands;  // query, key, weights, some of which are negative
  at::Tensor starts;

  ops::IndexerInputs as(at::ScalarType type) const {
    const auto wide = type == at::kDouble ? at::kDouble : at::kFloat;
    return {operands[0].to(type).detach().set_requires_grad(true),
            operands[1].to(type).detach().set_requires_grad(true),
            operands[2].to(wide).detach().set_requires_grad(true)};
  }
};

Indexer indexer(const Case& c, at::ScalarType dtype, double query_std = 1) {
  const auto starts = doc_start(c.documents);
  const int64_t B = starts.size(0), S = starts.size(1);
  return {{normal({B, S, c.Hi, c.Di}, 4, query_std, dtype), normal({B, S, c.Di}, 5, 1, dtype),
           normal({B, S, c.Hi}, 6, 0.3, at::kFloat)},
          starts};
}

struct LossAndGradients {
  at::Tensor loss;
  Inputs gradients;
};

LossAndGradients evaluated(const ops::IndexerInputs& in, const at::Tensor& loss) {
  return {loss, torch::autograd::grad({loss}, {in.query_BSHD, in.key_BSD, in.weights_BSH})};
}

// The state that an attention over these operands leaves.
ops::AttentionState state_after(const Case& c, const Inputs& in, Kernel kernel) {
  const auto value = in.size() > 2 ? in[2] : at::Tensor();
  const auto r =
      ops::flash_attention(in[0], in[1], value, doc_start(c.documents), options(c, kernel));
  return {.query_BSHD = in[0],
          .key = in[1],
          .softmax_max = r.softmax_max,
          .softmax_sum = r.softmax_sum,
          .scale = 0.3};
}

// The definition, in fp64.
at::Tensor expected_head_sum(const Case& c, const Inputs& in) {
  auto with_sum = options(c, Kernel::kReference);
  with_sum.return_head_sum = true;
  const auto value = in.size() > 2 ? in[2].to(at::kDouble) : at::Tensor();
  return ops::flash_attention(in[0].to(at::kDouble), in[1].to(at::kDouble), value,
                              doc_start(c.documents), with_sum)
      .head_sum;
}

TEST_P(FusedDense, HeadSum) {
  for (const auto& c : kCases) {
    for (const Form form : kForms) {
      const auto in = operands(c, form, dtype());
      auto with_sum = options(c, Kernel::kFused);
      with_sum.return_head_sum = true;
      const auto value = in.size() > 2 ? in[2] : at::Tensor();
      const auto found =
          ops::flash_attention(in[0], in[1], value, doc_start(c.documents), with_sum);
      EXPECT_LT(frobenius(found.head_sum, expected_head_sum(c, in), kSmall), 3e-5) << c.name;
    }
  }
}

TEST_P(FusedDense, IndexerLossAndItsGradients) {
  for (const auto& c : kCases) {
    for (const Form form : {Form::kAbsorbed, Form::kExpanded}) {
      SCOPED_TRACE(::testing::Message() << c.name << ", form " << static_cast<int>(form));
      const auto in = operands(c, form, dtype());
      const auto index = indexer(c, dtype());
      const auto wide = index.as(at::kDouble), own = index.as(dtype());
      const auto expected =
          evaluated(wide, ops::dense_indexer_kl_loss(wide, index.starts, expected_head_sum(c, in)));
      const auto actual =
          evaluated(own, ops::dense_indexer_kl_loss(own, state_after(c, in, Kernel::kFused),
                                                    index.starts, {.kernel = Kernel::kFused}));
      EXPECT_LT(frobenius(actual.loss, expected.loss, kSmall), 3e-5);
      EXPECT_LT(frobenius(actual.gradients[0], expected.gradients[0], kSmall), index_limit())
          << "query";
      EXPECT_LT(frobenius(actual.gradients[1], expected.gradients[1], kSmall), index_limit())
          << "key";
      EXPECT_LT(frobenius(actual.gradients[2], expected.gradients[2], kSmall), 1e-4) << "weights";
      const at::NoGradGuard no_grad;
      const auto alone = ops::dense_indexer_kl_loss(own, state_after(c, in, Kernel::kFused),
                                                    index.starts, {.kernel = Kernel::kFused});
      EXPECT_TRUE(at::equal(alone, actual.loss)) << "without gradients";
    }
  }
}

// Two ranks with some of the heads each: the loss of a slice of the queries, as short as the
// indexer's, from head sums that are added up before they are normalised. What a rank would get
// from the other is recorded in a first pass, whose results do not count.
TEST_P(FusedDense, IndexerLossOfSlicesWithHeadsOnTwoRanks) {
  const Case c{"", {{150, 300, 30}}, 3, 64, 32, 4, 32};
  const std::vector<ops::HeadShards::Slice> slices = {{0, 290}, {290, 190}};
  const auto in = operands(c, Form::kExpanded, dtype());
  const auto index = indexer(c, dtype());
  const auto wide = index.as(at::kDouble), own = index.as(dtype());
  const auto expected =
      evaluated(wide, ops::dense_indexer_kl_loss(wide, index.starts, expected_head_sum(c, in)));
  const auto state = state_after(c, in, Kernel::kFused);
  std::vector<std::vector<at::Tensor>> terms(2);
  const auto loss = [&](size_t rank, size_t pass) {
    const auto heads = [&](const at::Tensor& x) {
      return rank == 0 ? x.narrow(2, 0, 1) : x.narrow(2, 1, 2);
    };
    const auto queries = [&](const at::Tensor& x) {
      return x.narrow(1, slices[rank].first, slices[rank].count);
    };
    size_t round = 0;
    const auto reduce_scatter = [&](const at::Tensor& x) {
      const auto at_rank = static_cast<int64_t>(rank);
      if (pass == 0) terms[rank].push_back(x.clone());
      return pass == 0 ? x[at_rank] : x[at_rank] + terms[1 - rank].at(round++)[at_rank];
    };
    return ops::dense_indexer_kl_loss(
        {queries(own.query_BSHD), own.key_BSD, queries(own.weights_BSH)},
        {.query_BSHD = heads(state.query_BSHD),
         .key = heads(state.key),
         .softmax_max = heads(state.softmax_max),
         .softmax_sum = heads(state.softmax_sum),
         .scale = state.scale},
        index.starts,
        {.kernel = Kernel::kFused, .shards = ops::HeadShards{slices, rank, reduce_scatter}});
  };
  for (const size_t rank : {0, 1}) loss(rank, 0);
  ASSERT_EQ(terms[0].size(), 3u);  // the longer slice has three blocks
  for (size_t round = 0; round < 3; ++round) {
    EXPECT_EQ(terms[0][round].sizes(), terms[1].at(round).sizes());
  }
  const auto actual = evaluated(own, loss(0, 1) + loss(1, 1));
  EXPECT_LT(frobenius(actual.loss, expected.loss, kSmall), 3e-5);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_LT(frobenius(actual.gradients[i], expected.gradients[i], kSmall), index_limit()) << i;
  }
}

TEST_P(FusedDense, SoftmaxOfTheIndexScores) {
  for (const auto& c : kCases) {
    const auto index = indexer(c, dtype());
    const auto expected =
        ops::dense_indexer_softmax(index.as(at::kDouble), index.starts, Kernel::kReference);
    const auto actual = ops::dense_indexer_softmax(index.as(dtype()), index.starts, Kernel::kFused);
    EXPECT_LT(frobenius(actual.max_BS, expected.max_BS), 3e-6) << c.name;
    EXPECT_LT(frobenius(actual.sum_BS, expected.sum_BS), 3e-6) << c.name;
  }
}

// A NaN in the last key, which only the last query sees, shows in the loss, whether it comes from
// the indexer or from the attention; from there it reaches that query's gradient only.
TEST_P(FusedDense, NaNReachesTheLoss) {
  constexpr int64_t kLast = 70;
  const Case c{"", {{kLast + 1}}, 2, 32, 32, 4, 32};
  const auto in = operands(c, Form::kAbsorbed, dtype());
  const auto index = indexer(c, dtype());
  const auto loss_of = [&](const Indexer& of, const Inputs& attended) {
    const auto own = of.as(dtype());
    return evaluated(own, ops::dense_indexer_kl_loss(own, state_after(c, attended, Kernel::kFused),
                                                     of.starts, {.kernel = Kernel::kFused}));
  };
  const auto with_nan = [&](const at::Tensor& keys) {
    const auto x = keys.clone();
    x.select(1, kLast).fill_(NAN);
    return x;
  };
  auto broken = index;
  broken.operands[1] = with_nan(index.operands[1]);
  EXPECT_TRUE(loss_of(broken, in).loss.isnan().item<bool>());
  const auto expected = loss_of(index, in).gradients[0];
  const auto found = loss_of(index, {in[0], with_nan(in[1])});
  EXPECT_TRUE(found.loss.isnan().item<bool>());
  const auto& d_query = found.gradients[0];
  EXPECT_TRUE(at::equal(d_query.narrow(1, 0, kLast), expected.narrow(1, 0, kLast)));
  EXPECT_TRUE(d_query.select(1, kLast).isnan().any().item<bool>());
  const auto softmax =
      ops::dense_indexer_softmax(broken.as(dtype()), broken.starts, Kernel::kFused);
  EXPECT_TRUE(softmax.sum_BS[0][kLast].isnan().item<bool>());
  EXPECT_EQ(softmax.sum_BS.isnan().sum().item<int64_t>(), 1);
}

// With the softmax known, and some queries at a time.
TEST_P(FusedDense, IndexerLossInPieces) {
  const Case c{"", {{150, 30}, {-60, 120}}, 3, 64, 32, 4, 32};
  const auto in = operands(c, Form::kAbsorbed, dtype());
  const auto index = indexer(c, dtype());
  const auto wide = index.as(at::kDouble), own = index.as(dtype());
  const auto expected =
      evaluated(wide, ops::dense_indexer_kl_loss(wide, index.starts, expected_head_sum(c, in)));
  const auto softmax = ops::dense_indexer_softmax(own, index.starts, Kernel::kFused);
  auto loss = at::zeros({}), d_key = at::zeros(own.key_BSD.sizes());
  std::vector<at::Tensor> d_query, d_weights;
  for (const auto& [from, count] : {std::pair<int64_t, int64_t>{0, 37}, {37, 143}}) {
    const auto cut = [&](const at::Tensor& x) { return x.detach().narrow(1, from, count); };
    auto state = state_after(c, in, Kernel::kFused);
    for (auto* x : {&state.query_BSHD, &state.softmax_max, &state.softmax_sum}) *x = cut(*x);
    const auto range = ops::KeyRange(index.starts).of_queries(from, count);
    const ops::HeadSums sums(state, range, Kernel::kFused);
    const auto piece = ops::dense_indexer_kl_gradients(
        {cut(own.query_BSHD), own.key_BSD.detach(), cut(own.weights_BSH)}, range,
        [&](const ops::QueryBlock& block) { return sums.of(block); },
        {.kernel = Kernel::kFused, .softmax = {cut(softmax.max_BS), cut(softmax.sum_BS)}});
    loss = loss + piece.loss;
    d_key = d_key + piece.grads.key_BSD.to(at::kFloat);
    d_query.push_back(piece.grads.query_BSHD);
    d_weights.push_back(piece.grads.weights_BSH);
  }
  EXPECT_LT(frobenius(loss, expected.loss, kSmall), 3e-5);
  EXPECT_LT(frobenius(at::cat(d_query, 1), expected.gradients[0], kSmall), index_limit());
  EXPECT_LT(frobenius(d_key, expected.gradients[1], kSmall), index_limit());
  EXPECT_LT(frobenius(at::cat(d_weights, 1), expected.gradients[2], kSmall), 1e-4);
}

// The last block of a long row, whose 64 index heads take more than a superblock in fp32 (58 at
// most; block_scatter.h). Queries and keys are multiples of 1/8, so that no order of a sum turns a
// product's sign.
TEST_P(FusedDense, IndexerLossOfSeveralSuperblocksOfHeads) {
  constexpr int64_t kKeys = 1020, kQueries = 128;
  const Case c{"", {{kKeys}}, 1, 32, 32, 64, 32};
  auto index = indexer(c, at::kFloat);
  for (const size_t i : {0, 1}) index.operands[i] = (index.operands[i] * 8).round() / 8;
  const auto range = ops::KeyRange(index.starts).of_queries(kKeys - kQueries, kQueries);
  const auto sees_nothing = ops::visible_mask(range, kKeys)[0].t().logical_not();
  const auto head_sum =
      normal({kKeys, kQueries}, 9, 1, at::kFloat).exp().masked_fill(sees_nothing, 0);
  const auto gradients = [&](at::ScalarType type, Kernel kernel) {
    const auto in = index.as(type);
    const auto cut = [&](const at::Tensor& x) {
      return x.detach().narrow(1, kKeys - kQueries, kQueries);
    };
    return ops::dense_indexer_kl_gradients(
        {cut(in.query_BSHD), in.key_BSD.detach(), cut(in.weights_BSH)}, range,
        [&](const ops::QueryBlock&) { return head_sum.to(in.weights_BSH.scalar_type()); },
        {.kernel = kernel});
  };
  const auto expected = gradients(at::kDouble, Kernel::kReference);
  const auto actual = gradients(dtype(), Kernel::kFused);
  EXPECT_LT(frobenius(actual.loss, expected.loss, kSmall), 3e-5);
  EXPECT_LT(frobenius(actual.grads.query_BSHD, expected.grads.query_BSHD, kSmall), index_limit());
  EXPECT_LT(frobenius(actual.grads.key_BSD, expected.grads.key_BSD, kSmall), index_limit());
  EXPECT_LT(frobenius(actual.grads.weights_BSH, expected.grads.weights_BSH, kSmall), 1e-4);
}

// Where the indexer has learnt its target the loss is far smaller than its terms: the indexer is
// the attention's only head, with weights 1 and scores that are positive.
TEST_P(FusedDense, IndexerLossNearItsMinimum) {
  const Case c{"", {{200}}, 1, 32, 32, 1, 32};
  const auto starts = doc_start(c.documents);
  const auto query = normal({1, 200, 1, 32}, 1).abs().to(dtype());
  const auto key = (normal({1, 200, 32}, 2).abs() * 0.3).to(dtype());
  const auto loss = [&](at::ScalarType type, Kernel kernel) {
    const auto wide = type == at::kDouble ? at::kDouble : at::kFloat;
    const auto q = query.to(type), k = key.to(type);
    const auto r = ops::flash_attention(
        q, k, {}, starts,
        {.scale = 1.001, .value_dim = 32, .return_statistics = true, .kernel = kernel});
    return ops::dense_indexer_kl_loss({q, k, at::ones({1, 200, 1}, wide)},
                                      {.query_BSHD = q,
                                       .key = k,
                                       .softmax_max = r.softmax_max,
                                       .softmax_sum = r.softmax_sum,
                                       .scale = 1.001},
                                      starts, {.kernel = kernel})
        .item<double>();
  };
  const double expected = loss(at::kDouble, Kernel::kReference);
  EXPECT_GT(expected, 0);
  EXPECT_LT(expected, 1e-2);
  // Scores of size 10 are off by 1e-6, 1e-4 of what separates the distributions.
  EXPECT_NEAR(loss(dtype(), Kernel::kFused) / expected, 1, 1e-2);
}

// A negative scale must not let invisible keys in.
TEST_P(FusedDense, NegativeScale) {
  const Case c{"", {{40, 30}}, 2, 64, 32};
  const auto in = operands(c, Form::kAbsorbed, dtype());
  const auto run = [&](at::ScalarType type, Kernel kernel) {
    Inputs leaves = {in[0].to(type).detach().set_requires_grad(true),
                     in[1].to(type).detach().set_requires_grad(true)};
    const auto result = ops::flash_attention(leaves[0], leaves[1], {}, doc_start(c.documents),
                                             {.scale = -0.2, .value_dim = c.V, .kernel = kernel});
    auto all = torch::autograd::grad({(result.out_BSHV * d_out(c).to(type)).sum()}, leaves);
    all.push_back(result.out_BSHV);
    return all;
  };
  const auto expected = run(at::kDouble, Kernel::kReference), actual = run(dtype(), Kernel::kFused);
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_LT(frobenius(actual[i], expected[i]), limit()) << i;
  }
}

// The sums of keys are shared among more blocks of queries than a superblock holds.
TEST_P(FusedDense, ThreadsDoNotChangeABit) {
  const Case c{"", {{700, 320}}, 9, 64, 32, 5, 32};
  const int before = at::get_num_threads();
  for (const Form form : kForms) {
    const auto in = operands(c, form, dtype());
    std::vector<at::Tensor> first;
    for (const int threads : {1, 2, 3}) {
      at::set_num_threads(threads);
      auto found = attend(c, in, dtype(), Kernel::kFused, d_out(c));
      std::vector<at::Tensor> all = found.gradients;
      all.push_back(found.result.out_BSHV);
      all.push_back(found.result.softmax_sum);
      const auto index = indexer(c, dtype()).as(dtype());
      const auto loss = evaluated(
          index, ops::dense_indexer_kl_loss(index, state_after(c, in, Kernel::kFused),
                                            doc_start(c.documents), {.kernel = Kernel::kFused}));
      all.push_back(loss.loss);
      all.insert(all.end(), loss.gradients.begin(), loss.gradients.end());
      const auto softmax =
          ops::dense_indexer_softmax(index, doc_start(c.documents), Kernel::kFused);
      all.push_back(softmax.max_BS);
      all.push_back(softmax.sum_BS);
      if (first.empty()) {
        first = all;
        const auto expected = attend(c, in, at::kDouble, Kernel::kReference, d_out(c));
        for (size_t i = 0; i < in.size(); ++i) {
          EXPECT_LT(frobenius(found.gradients[i], expected.gradients[i]), limit()) << i;
        }
      }
      for (size_t i = 0; i < all.size(); ++i) EXPECT_TRUE(at::equal(all[i], first[i])) << i;
    }
  }
  at::set_num_threads(before);
}

INSTANTIATE_TEST_SUITE_P(Dtypes, FusedDense, ::testing::Values(at::kFloat, at::kBFloat16));

}  // namespace
}  // namespace longhaul::testing
