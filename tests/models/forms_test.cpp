// Different ways to compute the same model give the same numbers in fp64: absorbed and expanded
// MLA, the indexer with and without the Hadamard rotation.
#include <gmock/gmock.h>

#include "longhaul/base/error.h"
#include "longhaul/models/deepseek_v3/indexer.h"
#include "longhaul/ops/lightning_indexer/lightning_indexer.h"
#include "tests/models/tiny_model.h"

namespace longhaul::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Sums of some hundred terms in another order; gradients pass a few more of them.
constexpr double kTolerance = 1e-12;

v3::ModelConfig config_of(bool q_lora, bool softmax) {
  auto config = tiny_config();
  if (!q_lora) config.q_lora_rank = 0;
  if (softmax) {
    config.scoring_func = v3::ScoreFunction::kSoftmax;
    config.n_group = config.topk_group = 1;
    config.norm_topk_prob = false;
  }
  return config;
}

void expect_equal_runs(const Run& actual, const Run& expected) {
  ASSERT_EQ(actual.by_tower.size(), expected.by_tower.size());
  for (size_t i = 0; i < actual.by_tower.size(); ++i) {
    EXPECT_NEAR(actual.by_tower[i] / expected.by_tower[i], 1.0, kTolerance);
  }
  for (const auto& [layer, loss] : expected.stats.indexer_loss) {
    EXPECT_NEAR(actual.stats.indexer_loss.at(layer).item<double>() / loss.item<double>(), 1.0,
                1e-11)
        << "KL of layer " << layer;
  }
  EXPECT_THAT(differing(actual.gradients, expected.gradients, kTolerance), IsEmpty());
}

class Forms : public ::testing::TestWithParam<std::tuple<bool, bool, v3::IndexerStage>> {};

TEST_P(Forms, AbsorbedEqualsExpanded) {
  const auto [q_lora, softmax, stage] = GetParam();
  const auto config = config_of(q_lora, softmax);
  auto settings = fp64_settings();
  settings.stage = stage;
  const auto absorbed = run(*tiny_model(config, settings), tiny_batch());
  settings.mla_form = v3::MlaForm::kExpanded;
  const auto expanded = run(*tiny_model(config, settings), tiny_batch());
  expect_equal_runs(absorbed, expanded);
}

INSTANTIATE_TEST_SUITE_P(Shapes, Forms,
                         ::testing::Combine(::testing::Bool(), ::testing::Bool(),
                                            ::testing::Values(v3::IndexerStage::kSparse,
                                                              v3::IndexerStage::kOff)));

TEST(Hadamard, ChangesNothingInExactArithmetic) {
  for (const auto stage : {v3::IndexerStage::kSparse, v3::IndexerStage::kDenseWarmup}) {
    auto settings = fp64_settings();
    settings.stage = stage;
    const auto plain = run(*tiny_model(tiny_config(), settings), tiny_batch());
    settings.hadamard = true;
    const auto rotated = run(*tiny_model(tiny_config(), settings), tiny_batch());
    expect_equal_runs(rotated, plain);
  }
}

// What the model hands to the operators is rotated on both sides: products agree, vectors do not.
TEST(Hadamard, RotatesQueriesAndKeysAlike) {
  const auto operands = [](bool hadamard) {
    auto settings = fp64_settings();
    settings.hadamard = hadamard;
    std::map<std::string, at::Tensor> seen;
    v3::ForwardContext ctx;
    const auto batch = tiny_batch();
    ctx.counts.add(batch);
    ctx.probe = [&](const std::string& name, int64_t layer, const at::Tensor& x) {
      if (layer == 0) seen[name] = x.detach();
    };
    tiny_model(tiny_config(), settings)->forward(batch, ctx);
    return seen;
  };
  auto plain = operands(false), rotated = operands(true);
  const auto dots = [](std::map<std::string, at::Tensor>& x) {
    return at::einsum("bthd,bsd->bths", {x.at("indexer_query"), x.at("indexer_key")});
  };
  EXPECT_LT(max_difference(dots(rotated), dots(plain)), 1e-12);
  EXPECT_GT(max_difference(rotated.at("indexer_query"), plain.at("indexer_query")), 0.1);
  EXPECT_GT(max_difference(rotated.at("indexer_key"), plain.at("indexer_key")), 0.1);
}

// d = 128, 1000 random pairs; S = 64, key 17 is 3 times query 60, the others are small.
TEST(Hadamard, KeepsProductsAndThePlantedKey) {
  const auto h = v3::hadamard_matrix(128);
  const auto a = normal({1000, 128}, 1), b = normal({1000, 128}, 2);
  EXPECT_LT(max_difference((a.matmul(h) * b.matmul(h)).sum(-1), (a * b).sum(-1)), 1e-9);
  EXPECT_LT(max_difference(h.matmul(h.t()), at::eye(128, at::kDouble)), 1e-14);

  const auto q = normal({1, 64, 1, 128}, 3);
  auto k = normal({1, 64, 128}, 4, 0.1);
  k[0][17].copy_(q[0][60][0] * 3);
  for (const auto& [query, key] : {std::pair{q, k}, std::pair{q.matmul(h), k.matmul(h)}}) {
    const auto selected = ops::lightning_indexer(query, key, at::ones({1, 64, 1}, at::kDouble),
                                                 at::zeros({1, 64}, at::kLong), 4)
                              .indices_BSK[0][60];
    EXPECT_TRUE((selected == 17).any().item<bool>());
  }
}

TEST(Hadamard, WantsAPowerOfTwo) {
  auto config = tiny_config();
  config.index_head_dim = 12;
  auto settings = fp64_settings();
  EXPECT_NO_THROW(v3::Model(config, settings));
  settings.hadamard = true;
  EXPECT_THROW(v3::Model(config, settings), UserError);
  EXPECT_THAT(message_of([&] { v3::Model(config, settings); }),
              HasSubstr("power of two, it is 12"));
}

// The indexer's rope is half-split, MLA's interleaved: with one angle for all they would agree.
TEST(IndexerRope, InterleavedIsAnotherModel) {
  auto settings = fp64_settings();
  const auto half_split = run(*tiny_model(tiny_config(), settings), tiny_batch());
  settings.indexer_rope_interleaved = true;
  const auto interleaved = run(*tiny_model(tiny_config(), settings), tiny_batch());
  EXPECT_GT(
      std::abs(Run::sum(half_split.stats.indexer_loss) - Run::sum(interleaved.stats.indexer_loss)),
      1e-4);
}

}  // namespace
}  // namespace longhaul::testing
