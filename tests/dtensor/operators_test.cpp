// Our own operators on DTensors: in every placement of their inputs they give the numbers and the
// gradients of the plain operator, and they communicate what the recipe says and nothing else.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "longhaul/nn/layers.h"
#include "longhaul/ops/cross_entropy/cross_entropy.h"
#include "longhaul/ops/indexer_kl_loss/indexer_kl_loss.h"
#include "longhaul/ops/lightning_indexer/lightning_indexer.h"
#include "longhaul/ops/matmul/matmul.h"
#include "longhaul/ops/rms_norm/rms_norm.h"
#include "longhaul/ops/rotary_mul/rotary_mul.h"
#include "longhaul/ops/sparse_flash_attention/sparse_flash_attention.h"
#include "longhaul/ops/swiglu/swiglu.h"
#include "tests/dtensor/dtensor_table.h"
#include "tests/support/log_capture.h"
#include "tests/support/run_ranks.h"

namespace longhaul::test {
namespace {

using dtensor::DeviceMesh;
using dtensor::World;
using Inputs = std::vector<Tensor>;

constexpr int64_t kB = 2, kS = 6, kH = 4, kD = 8;

// Documents of 2 and 4 tokens, and of 5 and a padding.
Tensor doc_start() {
  return at::tensor({0, 0, 2, 2, 2, 2, 0, 0, 0, 0, 0, 6}, at::kLong).view({2, 6});
}

Tensor chosen_keys() {
  const Tensor even = (at::arange(kS) % 2 == 0).expand({kB, kS, kS});
  return ops::mask_to_indices(ops::visible_mask(doc_start()).logical_and(even), 3);
}

struct Case {
  std::string name;
  std::vector<std::vector<int64_t>> sizes;
  std::function<Tensor(const Inputs&)> f;
};

ops::AttentionOptions options() {
  return {.scale = 0.3, .value_dim = 5, .return_head_sum = true, .return_statistics = false};
}

Tensor weighted(const ops::AttentionResult& result) { return result.out_BSHV; }

std::vector<Case> cases() {
  return {
      {"linear", {{kB, kS, 8}, {12, 8}}, [](const Inputs& x) { return ops::linear(x[0], x[1]); }},
      {"linear_by_head",
       {{kB, kS, kH, 5}, {kH, 5, 3}},
       [](const Inputs& x) { return ops::linear_by_head(x[0], x[1]); }},
      {"rms_norm",
       {{kB, kS, 8}, {8}},
       [](const Inputs& x) { return ops::rms_norm(x[0], x[1], 1e-6); }},
      {"rms_norm_add",
       {{kB, kS, 8}, {kB, kS, 8}, {8}},
       [](const Inputs& x) {
         const auto [y, sum] = ops::rms_norm_add(x[0], x[1], x[2], 1e-6);
         return y * sum;
       }},
      {"swiglu",
       {{kB, kS, 8}, {kB, kS, 8}},
       [](const Inputs& x) { return ops::swiglu(x[0], x[1]); }},
      {"rotary_mul",
       {{kB, kS, kH, 8}},
       [](const Inputs& x) {
         const Tensor angle = normal({kB, kS, 4}, 5);
         return ops::rotary_mul(x[0], angle.cos(), angle.sin(), ops::RotaryMode::kInterleaved);
       }},
      {"cross-entropy",
       {{kB, kS, 8}, {11, 8}},
       [](const Inputs& x) {
         const Tensor labels =
             at::tensor({0, 3, 10, -100, 5, 6, 7, -100, 8, 9, 1, 2}, at::kLong).view({kB, kS});
         return ops::linear_cross_entropy(x[0], x[1], labels);
       }},
      {"flash_attention",
       {{kB, kS, kH, kD}, {kB, kS, kD}},
       [](const Inputs& x) {
         auto asked = options();
         asked.return_head_sum = false;
         return weighted(ops::flash_attention(x[0], x[1], {}, doc_start(), asked));
       }},
      {"flash_attention, keys by head",
       {{kB, kS, kH, kD}, {kB, kS, kH, kD}, {kB, kS, kH, 5}},
       [](const Inputs& x) {
         return weighted(ops::flash_attention(x[0], x[1], x[2], doc_start(), {.scale = 0.3}));
       }},
      {"sparse_flash_attention",
       {{kB, kS, kH, kD}, {kB, kS, kD}},
       [](const Inputs& x) {
         return weighted(ops::sparse_flash_attention(x[0], x[1], {}, chosen_keys(), options()));
       }},
  };
}

void expect_near(const Tensor& got, const Tensor& want, const std::string& what) {
  ASSERT_EQ(got.sizes(), want.sizes()) << what;
  EXPECT_LE((got - want).abs().max().item<double>(), 1e-10) << what;
}

void check(const Case& c, const Mesh& mesh) {
  Inputs wholes, plain;
  for (size_t i = 0; i < c.sizes.size(); ++i) {
    wholes.push_back(normal(c.sizes[i], 20 + i));
    plain.push_back(wholes[i].clone().requires_grad_());
  }
  const Tensor expected = c.f(plain);
  const Tensor g = normal(expected.sizes(), 30);
  torch::autograd::backward({(expected * g).sum()}, {});
  // Every placement of each input beside replicated others, and all inputs by turns.
  for (size_t i = 0; i < wholes.size(); ++i) {
    for (const auto& placement : all_placements(wholes[i].dim())) {
      for (const bool others_cut : {false, true}) {
        Inputs leaves;
        std::string what = c.name + " on " + mesh->text();
        for (size_t j = 0; j < wholes.size(); ++j) {
          const Placement own = j == i       ? placement
                                : others_cut ? Placement::shard(0)
                                             : Placement::replicate();
          what += " " + own.text();
          leaves.push_back(scatter(wholes[j], mesh, {own}).requires_grad_());
        }
        SCOPED_TRACE(what);
        Tensor y;
        try {
          y = c.f(leaves);
        } catch (const std::exception& error) {
          throw Error(what + ": " + error.what());
        }
        expect_near(whole_of(y), expected.detach(), "result");
        torch::autograd::backward({(dtensor::full_tensor(y) * g).sum()}, {});
        for (size_t j = 0; j < leaves.size(); ++j) {
          expect_near(whole_of(leaves[j].grad()), plain[j].grad(), "gradient " + std::to_string(j));
        }
      }
    }
  }
}

TEST(DistributedOperators, GiveTheNumbersOfThePlainOnes) {
  for (const int ranks : {2, 3}) {
    run_ranks(ranks, [&](World& world) {
      const Mesh mesh = DeviceMesh::make(world, {{"tp", ranks}});
      for (const Case& c : cases()) check(c, mesh);
    });
  }
}

// The kernel sees a token's whole row of logits. Said once in a process, so no other test here may
// ask for it.
TEST(DistributedOperators, ACutVocabularyIsSaidToHaveNoKernel) {
  const LogCapture log;
  run_ranks(2, [](World& world) {
    const Mesh mesh = DeviceMesh::make(world, {{"tp", 2}});
    const Tensor hidden = normal({6, 32}, 40).to(at::kFloat),
                 weight = normal({48, 32}, 41).to(at::kFloat);
    const Tensor labels = at::tensor({0, 47, 3, -100, 24, 23}, at::kLong);
    const Tensor loss = ops::linear_cross_entropy(
        dtensor::distribute(hidden, mesh, {Placement::replicate()}),
        dtensor::distribute(weight, mesh, {Placement::shard(0)}), labels, ops::Kernel::kFused);
    EXPECT_NEAR(whole_of(loss).item<double>(),
                ops::linear_cross_entropy(hidden, weight, labels).item<double>(), 1e-3);
  });
  EXPECT_THAT(log.text(),
              ::testing::HasSubstr("linear_cross_entropy: the fused kernel is not used: "
                                   "the vocabulary is cut"));
}

std::string log_of(const World& world) {
  std::string text;
  for (const auto& record : world.log().records()) {
    text += std::string(text.empty() ? "" : " ") + dtensor::name_of(record.kind);
  }
  return text;
}

TEST(DistributedOperators, EmbeddingOfASliceOfTheVocabulary) {
  run_ranks(3, [](World& world) {
    const Mesh mesh = DeviceMesh::make(world, {{"tp", 3}});
    const Tensor table = normal({7, 4}, 40);
    const Tensor ids = at::tensor({0, 6, 3, 2, 2, 5}, at::kLong).view({2, 3});
    nn::Embedding layer(7, 4, {.dtype = at::kDouble});
    layer.weight = dtensor::distribute(table, mesh, {Placement::shard(0)}).requires_grad_();
    const Tensor y = layer.forward(ids, at::kDouble);
    EXPECT_EQ(text_of(dtensor::spec_of(y).placements), "(Partial(sum))");
    expect_near(whole_of(y), at::embedding(table, ids), "rows");
    torch::autograd::backward({dtensor::full_tensor(y).square().sum()}, {});
    const Tensor plain = table.clone().requires_grad_();
    torch::autograd::backward({at::embedding(plain, ids).square().sum()}, {});
    EXPECT_EQ(text_of(dtensor::spec_of(layer.weight.grad()).placements), "(Shard(0))");
    expect_near(whole_of(layer.weight.grad()), plain.grad(), "gradient");
  });
}

TEST(DistributedOperators, TheIndexerSelectsAndLearnsInSlices) {
  run_ranks(2, [](World& world) {
    const Mesh mesh = DeviceMesh::make(world, {{"tp", 2}});
    const Tensor q = normal({kB, kS, 3, 4}, 50), k = normal({kB, kS, 4}, 51),
                 w = normal({kB, kS, 3}, 52);
    const auto expected = ops::lightning_indexer(q, k, w, doc_start(), 3);
    const Tensor head_sum =
        normal(expected.indices_BSK.sizes(), 53).abs().masked_fill(expected.indices_BSK < 0, 0);
    const auto at_sequence = Placement::shard(1);
    ops::IndexerInputs plain{q.clone().requires_grad_(), k.clone().requires_grad_(),
                             w.clone().requires_grad_()};
    const Tensor loss = ops::sparse_indexer_kl_loss(plain, expected.indices_BSK, head_sum);
    torch::autograd::backward({loss}, {});

    const auto part = [&](const Tensor& x) {
      return dtensor::distribute(x, mesh, {at_sequence}).requires_grad_();
    };
    ops::IndexerInputs parts{part(q), part(k), part(w)};
    world.log().clear();
    const auto selection =
        ops::lightning_indexer(parts.query_BSHD, parts.key_BSD, parts.weights_BSH, doc_start(), 3);
    EXPECT_EQ(log_of(world), "all_gather");  // the keys
    EXPECT_EQ(text_of(dtensor::spec_of(selection.indices_BSK).placements), "(Shard(1))");
    EXPECT_TRUE(at::equal(whole_of(selection.indices_BSK), expected.indices_BSK));
    expect_near(whole_of(selection.scores_BSK), expected.scores_BSK, "scores");

    const Tensor terms = scatter(head_sum, mesh, {Placement::partial()});
    const Tensor distributed = ops::sparse_indexer_kl_loss(parts, selection.indices_BSK, terms);
    expect_near(whole_of(distributed), loss.detach(), "loss");
    torch::autograd::backward({dtensor::full_tensor(distributed)}, {});
    expect_near(whole_of(parts.query_BSHD.grad()), plain.query_BSHD.grad(), "d query");
    expect_near(whole_of(parts.key_BSD.grad()), plain.key_BSD.grad(), "d key");
    expect_near(whole_of(parts.weights_BSH.grad()), plain.weights_BSH.grad(), "d weights");
  });
}

// Each rank with the loss of a slice of the queries (an empty one too) and its share of the head
// sums: neither the indexer's queries and weights nor their gradients move.
void check_dense_loss(int ranks) {
  run_ranks(ranks, [&](World& world) {
    const Mesh mesh = DeviceMesh::make(world, {{"tp", ranks}});
    const Tensor q = normal({kB, kS, 3, 4}, 60), k = normal({kB, kS, 4}, 61),
                 w = normal({kB, kS, 3}, 62);
    const Tensor query = normal({kB, kS, kH, kD}, 63), key = normal({kB, kS, kD}, 64);
    const ops::AttentionOptions asked{.scale = 0.3, .value_dim = 5, .return_statistics = true};
    const auto attention = ops::flash_attention(query, key, {}, doc_start(), asked);
    ops::IndexerInputs plain{q.clone().requires_grad_(), k.clone().requires_grad_(),
                             w.clone().requires_grad_()};
    const Tensor loss = ops::dense_indexer_kl_loss(plain,
                                                   {.query_BSHD = query,
                                                    .key = key,
                                                    .softmax_max = attention.softmax_max,
                                                    .softmax_sum = attention.softmax_sum,
                                                    .scale = 0.3},
                                                   doc_start());
    torch::autograd::backward({loss}, {});

    const auto part = [&](const Tensor& x, int64_t dim) {
      return dtensor::distribute(x, mesh, {Placement::shard(dim)});
    };
    ops::IndexerInputs parts{part(q, 1).requires_grad_(), part(k, 1).requires_grad_(),
                             part(w, 1).requires_grad_()};
    const Tensor heads = part(query, 2), keys = part(key, 1);
    const auto distributed = ops::flash_attention(heads, keys, {}, doc_start(), asked);
    world.log().clear();
    const Tensor loss_of_parts = ops::dense_indexer_kl_loss(parts,
                                                            {.query_BSHD = heads,
                                                             .key = keys,
                                                             .softmax_max = distributed.softmax_max,
                                                             .softmax_sum = distributed.softmax_sum,
                                                             .scale = 0.3},
                                                            doc_start());
    // The indexer's keys, the attention's, and the head sums of a block in each row.
    EXPECT_EQ(log_of(world), "all_gather all_gather reduce_scatter reduce_scatter");
    EXPECT_EQ(text_of(dtensor::spec_of(loss_of_parts).placements), "(Partial(sum))");
    const Tensor whole = dtensor::full_tensor(loss_of_parts);
    expect_near(whole.detach(), loss.detach(), "loss");
    world.log().clear();
    torch::autograd::backward({whole}, {});
    EXPECT_EQ(log_of(world), "reduce_scatter");  // of the keys' gradient
    for (const auto* x : {&parts.query_BSHD, &parts.weights_BSH}) {
      EXPECT_EQ(text_of(dtensor::spec_of(x->grad()).placements), "(Shard(1))");
    }
    expect_near(whole_of(parts.query_BSHD.grad()), plain.query_BSHD.grad(), "d query");
    expect_near(whole_of(parts.key_BSD.grad()), plain.key_BSD.grad(), "d key");
    expect_near(whole_of(parts.weights_BSH.grad()), plain.weights_BSH.grad(), "d weights");
  });
}

TEST(DistributedOperators, TheDenseIndexerLossIsDealtOutInSlices) {
  check_dense_loss(2);
  check_dense_loss(4);
}

// The recipe's two rules. A replicated input times a replicated weight stays replicated; the
// gradients of a column-wise output projection need neither the other ranks' dY nor another W.
TEST(MatmulRules, NothingIsCutThatComesWhole) {
  run_ranks(2, [](World& world) {
    const Mesh mesh = DeviceMesh::make(world, {{"tp", 2}});
    const Tensor x =
        dtensor::distribute(normal({1, 6, 8}, 70), mesh, {Placement::replicate()}).requires_grad_();
    const Tensor w =
        dtensor::distribute(normal({12, 8}, 71), mesh, {Placement::replicate()}).requires_grad_();
    world.log().clear();
    const Tensor y = ops::linear(x, w);
    torch::autograd::backward({y}, {at::ones_like(y)});
    EXPECT_EQ(text_of(dtensor::spec_of(y).placements), "(Replicate)");
    EXPECT_EQ(text_of(dtensor::spec_of(w.grad()).placements), "(Replicate)");
    EXPECT_EQ(text_of(dtensor::spec_of(x.grad()).placements), "(Replicate)");
    EXPECT_EQ(log_of(world), "");
  });
}

TEST(MatmulRules, GradientsOfAColumnWiseProjectionMoveNothing) {
  run_ranks(2, [](World& world) {
    const Mesh mesh = DeviceMesh::make(world, {{"tp", 2}});
    const Tensor x =
        dtensor::distribute(normal({1, 6, 8}, 70), mesh, {Placement::replicate()}).requires_grad_();
    const Tensor w =
        dtensor::distribute(normal({12, 8}, 71), mesh, {Placement::shard(0)}).requires_grad_();
    world.log().clear();
    const Tensor y = ops::linear(x, w);
    EXPECT_EQ(text_of(dtensor::spec_of(y).placements), "(Shard(2))");
    torch::autograd::backward({y}, {at::ones_like(y)});
    EXPECT_EQ(text_of(dtensor::spec_of(w.grad()).placements), "(Shard(0))");
    EXPECT_EQ(text_of(dtensor::spec_of(x.grad()).placements), "(Partial(sum))");
    EXPECT_EQ(log_of(world), "");
  });
}

}  // namespace
}  // namespace longhaul::test
