// What trains the indexer and what does not: its KL term alone, and nothing of it reaches the
// trunk.
#include <ATen/core/grad_mode.h>
#include <gmock/gmock.h>

#include "longhaul/ops/adam_w/adam_w.h"
#include "tests/models/tiny_model.h"

namespace longhaul::testing {
namespace {

using ::testing::IsEmpty;

Run run_with(const v3::ModelSettings& settings) {
  return run(*tiny_model(tiny_config(), settings), tiny_batch());
}

Tensors part(const Tensors& gradients, bool indexer) {
  Tensors result;
  for (const auto& [name, gradient] : gradients) {
    if (is_indexer(name) == indexer) result[name] = gradient;
  }
  return result;
}

TEST(IndexerTraining, TrunkGradientsDoNotDependOnTheCoefficient) {
  auto settings = fp64_settings();
  const auto one = run_with(settings);
  settings.indexer_loss_coeff = 0;
  const auto zero = run_with(settings);
  EXPECT_THAT(differing(part(one.gradients, false), part(zero.gradients, false), 0.0), IsEmpty());
  EXPECT_THAT(part(zero.gradients, true), IsEmpty()) << "not zeros: no gradient at all";
}

TEST(IndexerTraining, CoefficientScalesTheGradientNotTheStatistic) {
  auto settings = fp64_settings();
  const auto one = run_with(settings);
  settings.indexer_loss_coeff = 0.25;
  const auto quarter = run_with(settings);
  auto expected = part(one.gradients, true);
  for (auto& [name, gradient] : expected) gradient = gradient * 0.25;
  EXPECT_THAT(differing(part(quarter.gradients, true), expected, 1e-14), IsEmpty());
  EXPECT_EQ(Run::sum(quarter.stats.indexer_loss), Run::sum(one.stats.indexer_loss));
}

// One optimizer step of the sparse stage: every indexer tensor moves, by as much whether or not
// there is a language model loss at all.
TEST(IndexerTraining, OneSparseStepMovesItByTheKlTermOnly) {
  const auto step = [](double lm_weight) {
    const auto model = tiny_model();
    const auto batch = tiny_batch();
    v3::ForwardContext ctx;
    ctx.counts.add(batch);
    backward(forward_losses(*model, batch, ctx).total * lm_weight);
    Tensors moved;
    const at::NoGradGuard no_grad;
    for (const auto& parameter : model->parameters()) {
      if (!is_indexer(parameter.name)) continue;
      EXPECT_TRUE(parameter.tensor->grad().defined()) << parameter.name;
      const at::Tensor before = parameter.tensor->clone();
      at::Tensor m = at::zeros_like(before), v = at::zeros_like(before);
      ops::adam_w({{*parameter.tensor, parameter.tensor->grad(), m, v, 1}},
                  {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0});
      moved[parameter.name] = *parameter.tensor - before;
    }
    return moved;
  };
  const auto with = step(1.0), without = step(0.0);
  EXPECT_EQ(with.size(), 4U * 5U) << "wq_b, wk, k_norm (2) and weights_proj of four layers";
  for (const auto& [name, change] : with) {
    EXPECT_GT(change.abs().max().item<double>(), 5e-4) << name << " has not moved";
    EXPECT_TRUE(at::equal(change, without.at(name))) << name;
  }
}

TEST(IndexerTraining, FrozenOrOffHasNoGradientAtAll) {
  auto frozen = fp64_settings(), off = fp64_settings();
  frozen.train_indexer = false;
  off.stage = v3::IndexerStage::kOff;
  for (const auto& settings : {frozen, off}) {
    const auto model = tiny_model(tiny_config(), settings);
    const auto r = run(*model, tiny_batch());
    EXPECT_THAT(part(r.gradients, true), IsEmpty());
    EXPECT_TRUE(r.stats.indexer_loss.empty());
    for (const auto& parameter : model->parameters()) {
      EXPECT_EQ(parameter.tensor->requires_grad(), !is_indexer(parameter.name)) << parameter.name;
      EXPECT_EQ(r.gradients.count(v3::hf_views(parameter.name, *parameter.tensor)[0].first),
                is_indexer(parameter.name) ? 0U : 1U);
    }
  }
}

// A frozen indexer still selects: sparse attention, not dense.
TEST(IndexerTraining, FrozenStillSelects) {
  auto settings = fp64_settings();
  const double trained = run_with(settings).total;
  settings.train_indexer = false;
  EXPECT_EQ(run_with(settings).total, trained);
  settings.stage = v3::IndexerStage::kOff;
  EXPECT_GT(std::abs(run_with(settings).total - trained), 1e-4);
}

TEST(IndexerTraining, WarmupFreezesEverythingElse) {
  auto settings = fp64_settings();
  settings.stage = v3::IndexerStage::kDenseWarmup;
  const auto r = run_with(settings);
  EXPECT_THAT(part(r.gradients, false), IsEmpty());
  EXPECT_EQ(part(r.gradients, true).size(), 4U * 5U);
  // Attention is dense, as with the indexer off.
  settings.stage = v3::IndexerStage::kOff;
  EXPECT_EQ(r.total, run_with(settings).total);
}

TEST(IndexerTraining, SelectingEveryKeyIsDense) {
  auto config = tiny_config();
  config.index_topk = 64;
  auto settings = fp64_settings();
  const auto sparse = run(*tiny_model(config, settings), tiny_batch());
  settings.stage = v3::IndexerStage::kOff;
  const auto dense = run(*tiny_model(config, settings), tiny_batch());
  EXPECT_NEAR(sparse.total, dense.total, 1e-13);
  EXPECT_THAT(differing(part(sparse.gradients, false), dense.gradients, 1e-12), IsEmpty());
  settings.stage = v3::IndexerStage::kDenseWarmup;
  const auto warmup = run(*tiny_model(config, settings), tiny_batch());
  EXPECT_THAT(differing(part(sparse.gradients, true), warmup.gradients, 1e-11), IsEmpty());
}

// A model without an indexer (DeepSeek-V3) ignores the stage.
TEST(IndexerTraining, ModelsWithoutAnIndexer) {
  auto config = tiny_config();
  config.index_n_heads = 0;
  auto settings = fp64_settings();
  settings.stage = v3::IndexerStage::kDenseWarmup;
  const auto r = run(*tiny_model(config, settings), tiny_batch());
  EXPECT_EQ(r.gradients.count("model.embed_tokens.weight"), 1U) << "the trunk is not frozen";
}

}  // namespace
}  // namespace longhaul::testing
