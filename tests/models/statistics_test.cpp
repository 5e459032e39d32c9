// What a pass records and repeats: training counts once, recomputation nothing, evaluation only
// where it is asked to, and never differently.
#include <ATen/core/grad_mode.h>
#include <gmock/gmock.h>

#include "tests/models/tiny_model.h"

namespace longhaul::testing {
namespace {

using ::testing::IsEmpty;

v3::ModelSettings all_losses() {
  auto settings = fp64_settings();
  settings.sequence_balance_loss_coeff = settings.z_loss_coeff = 0.1;
  return settings;
}

bool empty(const v3::StepStats& stats) {
  return stats.indexer_loss.empty() && stats.balance_loss.empty() && stats.z_loss.empty() &&
         stats.expert_counts.empty();
}

TEST(Statistics, TrainingRecordsEveryLayer) {
  const auto r = run(*tiny_model(tiny_config(), all_losses()), tiny_batch());
  EXPECT_EQ(r.stats.indexer_loss.size(), 4U);
  EXPECT_EQ(r.stats.expert_counts.size(), 3U);
  EXPECT_EQ(r.stats.balance_loss.size(), 3U);
  EXPECT_EQ(r.stats.z_loss.size(), 3U);
  for (const auto& [layer, loss] : r.stats.indexer_loss) EXPECT_FALSE(loss.requires_grad());
}

// A recomputed pass has the auxiliary losses' gradients, but they are not recorded a second time.
TEST(Statistics, RecomputationRecordsNothingAndHasTheSameGradients) {
  const auto model = tiny_model(tiny_config(), all_losses());
  const auto batch = tiny_batch();
  v3::Decisions decisions;
  const auto first = run(*model, batch, &decisions);
  const auto again = run(*model, batch, &decisions, v3::Pass::kRecompute);
  EXPECT_TRUE(empty(again.stats));
  EXPECT_EQ(again.total, first.total);
  EXPECT_THAT(differing(again.gradients, first.gradients, 0.0), IsEmpty());
}

// Activation checkpointing of every block, MTP included: the same losses, statistics and gradients,
// bit for bit, with the reference operators and the fused ones.
TEST(Statistics, CheckpointedBlocksChangeNothing) {
  for (const auto kernel : {ops::Kernel::kReference, ops::Kernel::kFused}) {
    auto settings = all_losses();
    if (kernel == ops::Kernel::kFused) settings.param_dtype = settings.compute_dtype = at::kFloat;
    const auto run_with = [&](bool recompute) {
      settings.recompute.every = recompute ? 1 : 0;
      const auto model = tiny_model(tiny_config(), settings);
      for (const auto& slot : model->kernels()) *slot.kernel = kernel;
      return run(*model, tiny_batch());
    };
    const auto kept = run_with(false), again = run_with(true);
    EXPECT_EQ(again.total, kept.total);
    EXPECT_THAT(differing(again.gradients, kept.gradients, 0.0), IsEmpty());
    EXPECT_EQ(again.gradients.size(), kept.gradients.size());
    for (const auto part : {&v3::StepStats::indexer_loss, &v3::StepStats::balance_loss,
                            &v3::StepStats::z_loss, &v3::StepStats::expert_counts}) {
      ASSERT_EQ((again.stats.*part).size(), (kept.stats.*part).size());
      for (const auto& [layer, value] : kept.stats.*part) {
        EXPECT_TRUE(at::equal((again.stats.*part).at(layer), value)) << layer;
      }
    }
  }
}

// In the dense warm-up nothing flows through the trunk, so nothing is there to compute again.
TEST(Statistics, CheckpointedBlocksInTheDenseWarmup) {
  auto settings = all_losses();
  settings.stage = v3::IndexerStage::kDenseWarmup;
  const auto kept = run(*tiny_model(tiny_config(), settings), tiny_batch());
  settings.recompute.every = 1;
  const auto again = run(*tiny_model(tiny_config(), settings), tiny_batch());
  EXPECT_FALSE(kept.gradients.empty());
  EXPECT_THAT(differing(again.gradients, kept.gradients, 0.0), IsEmpty());
}

TEST(Statistics, WithoutAPlaceNothingIsRecorded) {
  const auto model = tiny_model();
  const auto batch = tiny_batch();
  v3::ForwardContext ctx;
  ctx.counts.add(batch);
  EXPECT_NO_THROW(model->forward(batch, ctx));
}

// Validation between two micro-batches: the training counts stay as they are, and the auxiliary
// losses take no part.
TEST(Statistics, EvaluationLeavesTrainingAlone) {
  const auto model = tiny_model(tiny_config(), all_losses());
  const auto batch = tiny_batch();
  v3::StepStats training;
  v3::ForwardContext ctx;
  ctx.counts.add(batch);
  ctx.stats = &training;
  model->forward(batch, ctx);
  const auto counts = training.expert_counts.at(1).clone();

  v3::ForwardContext evaluation;
  evaluation.pass = v3::Pass::kEvaluate;
  evaluation.counts = ctx.counts;
  zero_gradients(*model);
  backward(forward_losses(*model, batch, evaluation).total);
  EXPECT_TRUE(at::equal(training.expert_counts.at(1), counts));
  for (const auto& [name, gradient] : gradients(*model)) EXPECT_FALSE(is_indexer(name)) << name;

  const auto own = run(*model, batch, nullptr, v3::Pass::kEvaluate);
  EXPECT_TRUE(own.stats.indexer_loss.empty());
  EXPECT_TRUE(own.stats.balance_loss.empty());
  EXPECT_TRUE(at::equal(own.stats.expert_counts.at(1), counts)) << "its own statistics, if wanted";
}

// Between the passes the router's bias moves and the indexer changes its mind: what was decided
// stands.
TEST(Decisions, ReplayIsEqualBitByBit) {
  const auto model = tiny_model();
  const auto batch = tiny_batch();
  const at::NoGradGuard no_grad;
  const auto hidden = [&](v3::Decisions* decisions) {
    v3::ForwardContext ctx;
    ctx.counts.add(batch);
    ctx.decisions = decisions;
    return model->forward(batch, ctx);
  };
  v3::Decisions decisions;
  const auto first = hidden(&decisions);
  EXPECT_EQ(decisions.topk_indices.size(), 4U);
  EXPECT_EQ(decisions.experts.size(), 3U);
  for (const auto& [layer, router] : model->routers()) {
    router->bias().copy_(normal(router->bias().sizes(), layer, 10.0));
  }
  for (const auto& parameter : model->parameters()) {
    if (is_indexer(parameter.name)) parameter.tensor->mul_(-1);
  }
  const auto replayed = hidden(&decisions), free = hidden(nullptr);
  for (size_t i = 0; i < first.size(); ++i) {
    EXPECT_TRUE(at::equal(replayed[i], first[i])) << "tower " << i;
    EXPECT_FALSE(at::equal(free[i], first[i])) << "nothing had changed";
  }
}

TEST(Determinism, TwoRunsAreEqualBitByBit) {
  v3::ModelSettings settings;  // fp32
  const auto model = tiny_model(tiny_config(), settings);
  const auto batch = tiny_batch();
  const auto first = run(*model, batch), second = run(*model, batch);
  EXPECT_EQ(first.by_tower, second.by_tower);
  EXPECT_THAT(differing(second.gradients, first.gradients, 0.0), IsEmpty());
}

}  // namespace
}  // namespace longhaul::testing
