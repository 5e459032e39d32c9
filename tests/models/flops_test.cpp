// Parameters and floating-point operations counted from the shape, against the built model and
// against sums by hand.
#include "longhaul/models/deepseek_v3/flops.h"

#include <gtest/gtest.h>

#include "tests/models/tiny_model.h"

namespace longhaul::testing {
namespace {

int64_t elements(const v3::ModelConfig& config, v3::ModelSettings settings = {}) {
  settings.device = at::kMeta;
  int64_t sum = 0;
  for (const auto& parameter : v3::Model(config, settings).parameters()) {
    sum += parameter.tensor->numel();
  }
  return sum;
}

TEST(Parameters, EveryFlavorHasWhatIsCounted) {
  for (const auto& flavor : v3::flavors()) {
    const auto config = v3::find_flavor(flavor.model_name, flavor.name);
    EXPECT_EQ(v3::count_parameters(config).total, elements(config)) << flavor.name;
    auto with_mtp = config;
    with_mtp.num_nextn_predict_layers = 2;
    v3::ModelSettings settings;
    settings.mtp_own_norm = true;
    EXPECT_EQ(v3::count_parameters(with_mtp, settings).total, elements(with_mtp, settings))
        << flavor.name;
  }
}

TEST(Parameters, ActiveByHand) {
  // Attention: q_a 72, q_b 96, kv_a 108, kv_b 70, o 72; norms of the latents 6 + 5.
  const int64_t attention = 72 + 96 + 108 + 70 + 72 + 11;
  // Indexer: wq_b 96, wk 96, weights_proj 24; weight and bias of its norm.
  const int64_t indexer = 96 + 96 + 24 + 16;
  const int64_t block = attention + indexer + 24, expert = 252, router = 72;
  const int64_t dense = block + 360, sparse = block + router + expert;  // the shared one
  const int64_t mtp = 288 + 24;
  const int64_t outside = 2 * 276 + 12;
  const auto counts = v3::count_parameters(tiny_config());
  EXPECT_EQ(counts.active, outside + dense + 3 * (sparse + 2 * expert) + 2 * mtp);
  EXPECT_EQ(counts.total, outside + dense + 3 * (sparse + 6 * expert) + 2 * mtp);
}

// tiny_config() without MTP on a document of five tokens: 15 visible pairs, of which top-3 keeps
// 1 + 2 + 3 + 3 + 3 = 12.
class Flops : public ::testing::Test {
 protected:
  double count(v3::IndexerStage stage) {
    settings_.stage = stage;
    auto config = tiny_config();
    config.num_nextn_predict_layers = 0;
    return v3::training_flops_per_sequence(config, settings_, 5);
  }
  // Two operations for each element of two attentions, a dense MLP, router, shared and two routed
  // experts, and the head.
  const double trunk_ = 5 * 2 * (2 * 418 + 360 + 72 + 3 * 252 + 276);
  // Two layers, two heads; a score over 5 + 4 numbers, a value of 5.
  static double attention(int pairs) { return 2 * pairs * 2 * 2 * (9 + 5); }
  // Projections of one layer's indexer; a score of two heads over 8 numbers and the heads' weights.
  const double projections_ = 5 * 2 * 216, score_ = 2 * 2 * (8 + 1);
  v3::ModelSettings settings_;
};

TEST_F(Flops, Off) { EXPECT_EQ(count(v3::IndexerStage::kOff), 3 * (trunk_ + attention(15))); }

TEST_F(Flops, SparseIsCountedAsSparse) {
  // The indexer's input is detached, so its projections cost once more and not twice; scores of all
  // pairs forward, two products for each selected pair backward.
  const double indexer = 2 * projections_ + 15 * score_ + 2 * 12 * score_;
  EXPECT_EQ(count(v3::IndexerStage::kSparse), 3 * (trunk_ + attention(12)) + 2 * indexer);
  settings_.train_indexer = false;
  EXPECT_EQ(count(v3::IndexerStage::kSparse),
            3 * (trunk_ + attention(12)) + 2 * (projections_ + 15 * score_));
}

TEST_F(Flops, WarmUpGoesForwardThroughTheFrozenTrunk) {
  const double indexer = 2 * projections_ + 15 * score_ + 2 * 15 * score_;
  EXPECT_EQ(count(v3::IndexerStage::kDenseWarmup), trunk_ + attention(15) + 2 * indexer);
}

TEST_F(Flops, ExpandedFormHasShorterScores) {
  settings_.mla_form = v3::MlaForm::kExpanded;
  // Score over 4 + 4 numbers, a value of 3.
  EXPECT_EQ(count(v3::IndexerStage::kOff), 3 * (trunk_ + 2 * 15 * 2 * 2 * (8 + 3)));
}

}  // namespace
}  // namespace longhaul::testing
