// The indexer's recall is a measurement: what it says, and that nothing else changes by it.
#include <gmock/gmock.h>

#include "longhaul/ops/common.h"
#include "tests/models/tiny_model.h"

namespace longhaul::testing {
namespace {

using ::testing::IsEmpty;

// By "name.layer".
using Probed = std::map<std::string, at::Tensor>;

Run run_with_recall(v3::Model& model, bool measure, Probed* probed = nullptr) {
  const auto batch = tiny_batch();
  Run result;
  v3::ForwardContext ctx;
  ctx.counts.add(batch);
  ctx.stats = &result.stats;
  ctx.measure_recall = measure;
  if (probed != nullptr) {
    ctx.probe = [probed](const std::string& name, int64_t layer, const at::Tensor& value) {
      (*probed)[name + "." + std::to_string(layer)] = value.detach();
    };
  }
  zero_gradients(model);
  const auto losses = forward_losses(model, batch, ctx);
  backward(losses.total);
  result.total = losses.total.item<double>();
  result.gradients = gradients(model);
  zero_gradients(model);
  return result;
}

// The mean over valid queries and heads of the dense softmax's mass at the selected keys.
double recall_by_definition(const Probed& probed, const std::string& layer, double scale) {
  const auto slots = tiny_batch().towers[0];
  const auto query = probed.at("attn_query." + layer), key = probed.at("attn_key." + layer);
  const auto scores = at::einsum("bthd,bsd->bhts", {query, key}) * scale;
  const auto hidden = ops::visible_mask(slots.doc_start).logical_not().unsqueeze(1);
  const auto p = at::softmax(scores.masked_fill(hidden, -1e30), -1);
  const auto indices = probed.at("topk_indices." + layer).to(at::kLong).unsqueeze(1);
  const auto at_keys =
      p.gather(3, indices.clamp_min(0).expand({-1, p.size(1), -1, -1})).masked_fill(indices < 0, 0);
  const auto mass_BHT = at_keys.sum(-1) * slots.valid.unsqueeze(1);
  return mass_BHT.sum().item<double>() / static_cast<double>(slots.num_tokens * p.size(1));
}

TEST(Recall, IsTheShareOfDenseAttentionAtTheSelectedKeys) {
  const auto model = tiny_model();
  Probed probed;
  const auto r = run_with_recall(*model, true, &probed);
  ASSERT_EQ(r.stats.indexer_recall.size(), 4U) << "two layers and two MTP modules";
  for (const int64_t layer : {0, 1}) {
    const double expected =
        recall_by_definition(probed, std::to_string(layer), v3::softmax_scale(model->config()));
    const double actual = r.stats.indexer_recall.at(layer).item<double>();
    EXPECT_NEAR(actual, expected, 1e-12) << layer;
    EXPECT_LT(actual, 1) << "three keys are not all of them";
  }
}

TEST(Recall, OfAllKeysIsOne) {
  auto config = tiny_config();
  config.index_topk = 100;
  for (const auto stage : {v3::IndexerStage::kSparse, v3::IndexerStage::kDenseWarmup}) {
    auto settings = fp64_settings();
    settings.stage = stage;
    const auto r = run_with_recall(*tiny_model(config, settings), true);
    ASSERT_EQ(r.stats.indexer_recall.size(), 4U);
    for (const int64_t layer : {0, 1}) {
      EXPECT_NEAR(r.stats.indexer_recall.at(layer).item<double>(), 1, 1e-12);
    }
  }
}

// In the warm-up attention is dense, and the keys are those that the indexer would take. The first
// layer's input is the same in both stages.
TEST(Recall, OfTheDenseWarmupIsThatOfTheSameIndexer) {
  auto settings = fp64_settings();
  const auto sparse = run_with_recall(*tiny_model(tiny_config(), settings), true);
  settings.stage = v3::IndexerStage::kDenseWarmup;
  const auto dense = run_with_recall(*tiny_model(tiny_config(), settings), true);
  EXPECT_NEAR(dense.stats.indexer_recall.at(0).item<double>(),
              sparse.stats.indexer_recall.at(0).item<double>(), 1e-12);
}

TEST(Recall, BothFormsAndTheFusedKernelsAgree) {
  auto settings = fp64_settings();
  const auto expected = run_with_recall(*tiny_model(tiny_config(), settings), true);
  settings.mla_form = v3::MlaForm::kExpanded;
  const auto expanded = run_with_recall(*tiny_model(tiny_config(), settings), true);
  v3::ModelSettings fp32;
  const auto model = tiny_model(tiny_config(), fp32);
  for (const auto& slot : model->kernels()) *slot.kernel = ops::Kernel::kFused;
  const auto fused = run_with_recall(*model, true);
  for (const auto& [layer, recall] : expected.stats.indexer_recall) {
    EXPECT_NEAR(expanded.stats.indexer_recall.at(layer).item<double>(), recall.item<double>(),
                1e-12);
    EXPECT_NEAR(fused.stats.indexer_recall.at(layer).item<double>(), recall.item<double>(), 1e-4);
  }
}

// Also where results of the attention are kept for a recomputed pass, which does not measure.
TEST(Recall, ChangesNothing) {
  for (const bool recompute : {false, true}) {
    v3::ModelSettings settings;
    if (recompute) {
      settings.recompute = {
          .every = 1, .saved_operators = {"sparse_flash_attention", "flash_attention", "linear"}};
    }
    const auto model = tiny_model(tiny_config(), settings);
    for (const auto& slot : model->kernels()) *slot.kernel = ops::Kernel::kFused;
    const auto plain = run_with_recall(*model, false), measured = run_with_recall(*model, true);
    EXPECT_TRUE(plain.stats.indexer_recall.empty());
    EXPECT_EQ(measured.total, plain.total);
    EXPECT_THAT(differing(measured.gradients, plain.gradients, 0.0), IsEmpty());
  }
}

TEST(Recall, NothingWithoutAnIndexer) {
  auto settings = fp64_settings();
  settings.stage = v3::IndexerStage::kOff;
  const auto r = run_with_recall(*tiny_model(tiny_config(), settings), true);
  EXPECT_TRUE(r.stats.indexer_recall.empty());
}

}  // namespace
}  // namespace longhaul::testing
