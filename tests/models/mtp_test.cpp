// Multi-token prediction: slots whose token is missing or in another document take part in nothing.
#include <ATen/core/grad_mode.h>
#include <gmock/gmock.h>

#include "tests/models/tiny_model.h"

namespace longhaul::testing {
namespace {

constexpr int64_t kTrunkLayers = 2;

// Experts chosen in a layer, by sum.
int64_t choices(const Run& r, int64_t layer) {
  return r.stats.expert_counts.at(layer).sum().item<int64_t>();
}

TEST(Mtp, CountsOnlySlotsThatHaveTheirToken) {
  const auto batch = tiny_batch();
  const auto r = run(*tiny_model(), batch);
  const int64_t k = tiny_config().num_experts_per_tok;
  EXPECT_EQ(choices(r, 1), k * batch.towers[0].num_tokens);
  for (int64_t depth = 1; depth <= 2; ++depth) {
    EXPECT_LT(batch.towers[depth].num_tokens, batch.towers[depth - 1].num_tokens);
    EXPECT_EQ(choices(r, kTrunkLayers + depth - 1), k * batch.towers[depth].num_tokens);
  }
}

// The indexer's loss of an MTP layer is a mean over its own slots: with one valid slot, which sees
// one key, it is 0; with no label there is no cross-entropy.
TEST(Mtp, OneValidSlot) {
  const auto d = documents({2, 2});
  const auto batch = pack({{d[0], {}, {}}}, 6).batch(4);
  EXPECT_EQ(batch.towers[1].num_tokens, 1);
  const auto r = run(*tiny_model(), batch);
  EXPECT_NEAR(r.stats.indexer_loss.at(2).item<double>(), 0.0, 1e-15);
  EXPECT_EQ(r.by_tower[1], 0.0);
}

// Documents of one token: MTP has nothing to do, and says so with zeros instead of NaN.
TEST(Mtp, WithoutAnyValidSlot) {
  const auto d = documents({1, 1, 1});
  const auto batch = pack({{d[0], d[1], d[2]}}, 6).batch(4);
  EXPECT_EQ(batch.towers[1].num_tokens, 0);
  const auto r = run(*tiny_model(), batch);
  for (const int64_t layer : {2, 3}) {
    EXPECT_EQ(r.stats.indexer_loss.at(layer).item<double>(), 0.0);
    EXPECT_EQ(choices(r, layer), 0);
  }
  for (const auto& [name, gradient] : r.gradients) {
    EXPECT_TRUE(gradient.isfinite().all().item<bool>()) << name;
    if (name.find("layers.2.") == std::string::npos) continue;
    EXPECT_EQ(gradient.abs().max().item<double>(), 0.0) << name;
  }
}

// Depth 2 of a document of 3 predicts nothing from slots 1 and 2; its other slots do not move when
// the tokens there change.
TEST(Mtp, MissingSlotsAreNotAttended) {
  auto d = documents({3, 8});
  const auto model = tiny_model();
  const auto hidden_of_depth_2 = [&] {
    const at::NoGradGuard no_grad;
    const auto batch = pack({{d[0], d[1]}}, 13).batch(11);
    v3::ForwardContext ctx;
    ctx.counts.add(batch);
    return model->forward(batch, ctx)[2];
  };
  const auto before = hidden_of_depth_2();
  d[1][7] = (d[1][7] + 1) % 23;  // the last token: its own slot is valid in the trunk only
  const auto moved = (hidden_of_depth_2() - before).abs().amax(-1)[0];
  // Slot 3 + 5 reads it as the token two ahead; nothing before that may change.
  EXPECT_LE(moved.narrow(0, 0, 8).max().item<double>(), 1e-13);
  EXPECT_GT(moved[8].item<double>(), 1e-3);
}

// A batch without the extra slots trains the trunk alone.
TEST(Mtp, AsManyTowersAsTheBatchHas) {
  const auto d = documents({5, 7});
  const auto model = tiny_model();
  const auto trunk_only = run(*model, pack({{d[0], d[1]}}, 12).batch(12));
  EXPECT_EQ(trunk_only.by_tower.size(), 1U);
  EXPECT_EQ(trunk_only.gradients.count("model.layers.2.eh_proj.weight"), 0U);
  const auto both = run(*model, pack({{d[0], d[1]}}, 14).batch(12));
  EXPECT_NEAR(trunk_only.by_tower[0], both.by_tower[0], 1e-13);
  const auto three_deep = pack({{d[0], d[1]}}, 15).batch(12);
  EXPECT_THAT(message_of([&] { run(*model, three_deep); }),
              ::testing::HasSubstr("a batch with 4 towers for 2 MTP modules"));
}

TEST(Mtp, AfterNormAndOwnNormAreOtherModels) {
  const auto batch = tiny_batch();
  const double plain = run(*tiny_model(), batch).by_tower[1];
  auto settings = fp64_settings();
  settings.mtp_after_norm = true;
  EXPECT_GT(std::abs(run(*tiny_model(tiny_config(), settings), batch).by_tower[1] - plain), 1e-4);
  settings = fp64_settings();
  settings.mtp_own_norm = true;
  const auto own = run(*tiny_model(tiny_config(), settings), batch);
  EXPECT_EQ(own.gradients.count("model.layers.2.shared_head.norm.weight"), 1U);
}

}  // namespace
}  // namespace longhaul::testing
