// Packed documents are as if each were alone: nothing crosses a boundary, and padding is nothing.
#include <ATen/core/grad_mode.h>
#include <gmock/gmock.h>

#include "tests/models/tiny_model.h"

namespace longhaul::testing {
namespace {

using ::testing::IsEmpty;

constexpr int64_t kWidth = 18, kDepth = 2;

// Cross-entropy of each slot of each tower, [B, S]; 0 without a label.
std::vector<at::Tensor> token_losses(v3::Model& model, const v3::Batch& batch) {
  const at::NoGradGuard no_grad;
  v3::ForwardContext ctx;
  ctx.counts.add(batch);
  std::vector<at::Tensor> losses;
  const auto hidden = model.forward(batch, ctx);
  for (size_t i = 0; i < hidden.size(); ++i) {
    const auto logits = model.logits(hidden[i]).flatten(0, 1);
    losses.push_back(
        at::cross_entropy_loss(logits, batch.towers[i].labels.flatten(), {}, at::Reduction::None)
            .view_as(batch.towers[i].labels));
  }
  return losses;
}

struct Layouts {
  v3::Batch packed, alone;
  std::vector<std::pair<int64_t, int64_t>> place;  // row and first slot of each document, packed
};

// Two packed rows with padding in between, and the same documents in rows of their own.
Layouts layouts(const std::vector<Document>& d) {
  const std::vector<std::vector<Document>> rows = {{d[0], {}, d[1], d[2]},
                                                   {d[3], d[4], {}, {}, d[5]}};
  Layouts result;
  for (size_t b = 0; b < rows.size(); ++b) {
    int64_t t = 0;
    for (const auto& document : rows[b]) {
      if (!document.empty()) result.place.emplace_back(b, t);
      t += std::max<int64_t>(1, static_cast<int64_t>(document.size()));
    }
  }
  result.packed = pack(rows, kWidth + kDepth).batch(kWidth);
  std::vector<std::vector<Document>> single;
  for (const auto& document : d) single.push_back({document});
  result.alone = pack(single, kWidth + kDepth).batch(kWidth);
  return result;
}

class Packing : public ::testing::TestWithParam<v3::IndexerStage> {
 protected:
  std::unique_ptr<v3::Model> model(v3::ModelConfig config = tiny_config()) const {
    auto settings = fp64_settings();
    settings.stage = GetParam();
    return tiny_model(config, settings);
  }
};

TEST_P(Packing, EqualsTheDocumentsAlone) {
  const auto d = documents({5, 1, 9, 2, 7, 3});
  const auto [packed, alone, place] = layouts(d);
  const auto m = model();
  const auto in_pack = token_losses(*m, packed), by_itself = token_losses(*m, alone);
  for (size_t tower = 0; tower < in_pack.size(); ++tower) {
    for (size_t i = 0; i < d.size(); ++i) {
      const auto n = static_cast<int64_t>(d[i].size());
      const auto a = in_pack[tower][place[i].first].narrow(0, place[i].second, n);
      const auto b = by_itself[tower][static_cast<int64_t>(i)].narrow(0, 0, n);
      EXPECT_LT(max_difference(a, b), 1e-12) << "document " << i << ", tower " << tower;
    }
  }
  const auto p = run(*m, packed), a = run(*m, alone);
  EXPECT_THAT(differing(p.gradients, a.gradients, 1e-11), IsEmpty());
  for (const auto& [layer, loss] : a.stats.indexer_loss) {
    EXPECT_NEAR(p.stats.indexer_loss.at(layer).item<double>(), loss.item<double>(), 1e-12);
  }
  for (const auto& [layer, counts] : a.stats.expert_counts) {
    EXPECT_TRUE(at::equal(p.stats.expert_counts.at(layer), counts)) << layer;
  }
}

std::vector<at::Tensor> hidden_of(v3::Model& model, const v3::Batch& batch,
                                  v3::Decisions* decisions = nullptr) {
  const at::NoGradGuard no_grad;
  v3::ForwardContext ctx;
  ctx.counts.add(batch);
  ctx.decisions = decisions;
  return model.forward(batch, ctx);
}

// Another first token of the first row's second document: what changes, slot by slot.
struct Perturbed {
  v3::Batch before, after;
  int64_t begin, end;
};

Perturbed perturbed() {
  auto d = documents({5, 7, 6, 4});
  const auto rows = [&] { return pack({{d[0], d[1], d[2]}, {d[3]}}, kWidth + kDepth); };
  const auto before = rows().batch(kWidth);
  d[1][0] = (d[1][0] + 1) % 23;
  return {before, rows().batch(kWidth), 5, 12};
}

void expect_only_the_document_changed(const std::vector<at::Tensor>& before,
                                      const std::vector<at::Tensor>& after, const Perturbed& p,
                                      double tolerance) {
  for (size_t tower = 0; tower < before.size(); ++tower) {
    const auto moved = (after[tower] - before[tower]).abs().amax(-1);
    EXPECT_GT(moved[0].narrow(0, p.begin, p.end - p.begin).max().item<double>(), 1e-3);
    auto elsewhere = moved.clone();
    elsewhere[0].narrow(0, p.begin, p.end - p.begin).zero_();
    EXPECT_LE(elsewhere.max().item<double>(), tolerance) << "tower " << tower;
  }
}

// Without experts every product keeps its shape, so not a bit may change.
TEST_P(Packing, OtherDocumentsDoNotChangeABit) {
  auto config = tiny_config();
  config.n_routed_experts = 0;
  const auto m = model(config);
  const auto p = perturbed();
  expect_only_the_document_changed(hidden_of(*m, p.before), hidden_of(*m, p.after), p, 0.0);
}

// With experts the rows of an expert change in number and place, and so may roundings.
TEST_P(Packing, OtherDocumentsDoNotChangeWithExperts) {
  const auto m = model();
  const auto p = perturbed();
  expect_only_the_document_changed(hidden_of(*m, p.before), hidden_of(*m, p.after), p, 1e-13);
}

// With the routing held not a bit changes either. Selections are free: they must not cross.
TEST_P(Packing, OtherDocumentsDoNotChangeABitWithTheRoutingHeld) {
  const auto m = model();
  const auto p = perturbed();
  v3::Decisions decisions;
  const auto before = hidden_of(*m, p.before, &decisions);
  decisions.topk_indices.clear();
  expect_only_the_document_changed(before, hidden_of(*m, p.after, &decisions), p, 0.0);
}

TEST_P(Packing, GarbageInPaddingDoesNotChangeABit) {
  const auto m = model();
  const auto zeros = run(*m, tiny_rows(0).batch(kTinySeqLen)),
             garbage = run(*m, tiny_rows(22).batch(kTinySeqLen));
  EXPECT_EQ(zeros.by_tower, garbage.by_tower);
  for (const auto& [name, gradient] : zeros.gradients) {
    EXPECT_TRUE(at::equal(gradient, garbage.gradients.at(name))) << name;
  }
  for (const auto& [layer, loss] : zeros.stats.indexer_loss) {
    EXPECT_TRUE(at::equal(loss, garbage.stats.indexer_loss.at(layer)));
  }
}

// Rows and slots of padding more: not routed, no KL, not in T, no cross-entropy.
TEST_P(Packing, MorePaddingChangesNothing) {
  const auto d = documents({5, 7, 6, 4});
  const auto m = model();
  const auto tight = run(*m, pack({{d[0], d[1]}, {d[2], d[3]}}, 14).batch(12));
  const auto loose =
      run(*m, pack({{}, {{}, d[0], {}, d[1]}, {d[2], {}, {}, d[3]}, {}}, 25, 3).batch(23));
  for (size_t i = 0; i < tight.by_tower.size(); ++i) {
    EXPECT_NEAR(loose.by_tower[i], tight.by_tower[i], 1e-12);
  }
  EXPECT_THAT(differing(loose.gradients, tight.gradients, 1e-11), IsEmpty());
  for (const auto& [layer, counts] : tight.stats.expert_counts) {
    EXPECT_TRUE(at::equal(loose.stats.expert_counts.at(layer), counts)) << layer;
  }
  for (const auto& [layer, loss] : tight.stats.indexer_loss) {
    EXPECT_NEAR(loose.stats.indexer_loss.at(layer).item<double>(), loss.item<double>(), 1e-12);
  }
}

INSTANTIATE_TEST_SUITE_P(Stages, Packing,
                         ::testing::Values(v3::IndexerStage::kSparse,
                                           v3::IndexerStage::kDenseWarmup, v3::IndexerStage::kOff));

// Accumulating micro-batches equals one batch: losses are divided by global counts.
TEST(MicroBatches, AddUpToTheWhole) {
  const auto d = documents({5, 7, 6, 4});
  const auto m = tiny_model();
  const auto whole_batch = pack({{d[0], d[1]}, {d[2]}, {d[3]}}, 14).batch(12);
  const auto whole = run(*m, whole_batch);
  v3::GlobalCounts counts;
  counts.add(whole_batch);
  v3::StepStats stats;
  for (const auto& rows : {std::vector<std::vector<Document>>{{d[0], d[1]}},
                           std::vector<std::vector<Document>>{{d[2]}, {d[3]}}}) {
    v3::ForwardContext ctx;
    ctx.counts = counts;
    ctx.stats = &stats;
    backward(forward_losses(*m, pack(rows, 14).batch(12), ctx).total);
  }
  EXPECT_THAT(differing(gradients(*m), whole.gradients, 1e-11), IsEmpty());
  for (const auto& [layer, loss] : whole.stats.indexer_loss) {
    EXPECT_NEAR(stats.indexer_loss.at(layer).item<double>(), loss.item<double>(), 1e-12);
  }
}

}  // namespace
}  // namespace longhaul::testing
