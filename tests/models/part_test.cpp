// A model built and run part by part gives the whole's numbers.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "longhaul/base/error.h"
#include "tests/models/model_parts.h"

namespace longhaul::testing {
namespace {

Run run_parts(Parts& parts, const v3::Batch& batch) {
  Run result;
  v3::ForwardContext ctx;
  ctx.counts.add(batch);
  ctx.stats = &result.stats;
  const auto losses = forward_backward(parts, batch, ctx);
  result.total = losses.total.item<double>();
  result.by_tower = losses.by_tower;
  for (auto& part : parts) {
    for (auto& [name, gradient] : gradients(*part)) add_gradient(result.gradients, name, gradient);
  }
  return result;
}

void expect_equal_statistics(const v3::StepStats& actual, const v3::StepStats& expected) {
  const auto expect_equal = [](const auto& a, const auto& b, const char* what) {
    ASSERT_EQ(a.size(), b.size()) << what;
    for (const auto& [layer, value] : b) {
      ASSERT_EQ(a.count(layer), 1) << what << " of layer " << layer;
      EXPECT_TRUE(at::equal(a.at(layer), value)) << what << " of layer " << layer;
    }
  };
  expect_equal(actual.indexer_loss, expected.indexer_loss, "indexer loss");
  expect_equal(actual.balance_loss, expected.balance_loss, "balance loss");
  expect_equal(actual.expert_counts, expected.expert_counts, "expert counts");
}

struct Case {
  const char* name;
  std::vector<int64_t> cuts;
  v3::ModelSettings settings = fp64_settings();
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

std::vector<Case> cases() {
  auto warmup = fp64_settings();
  warmup.stage = v3::IndexerStage::kDenseWarmup;
  auto recomputed = fp64_settings();
  recomputed.recompute.every = 1;
  auto own_norm = fp64_settings();
  own_norm.mtp_own_norm = own_norm.mtp_after_norm = true;
  own_norm.sequence_balance_loss_coeff = 0.01;
  return {{"Whole", {}},
          {"Halves", {2}},
          {"EachLayer", {1, 2}},
          {"EmbeddingAndHeadAlone", {0, 3}},
          {"DenseWarmup", {1, 2}, warmup},
          {"Recomputed", {1, 2}, recomputed},
          {"OwnNorm", {1}, own_norm}};
}

class ModelParts : public ::testing::TestWithParam<Case> {};

TEST_P(ModelParts, GiveTheNumbersOfTheWhole) {
  const auto& c = GetParam();
  const auto expected = run(*tiny_model(three_layers(), c.settings), tiny_batch());
  auto parts = build(parts_at(c.cuts), c.settings);
  const auto actual = run_parts(parts, tiny_batch());
  EXPECT_EQ(actual.by_tower, expected.by_tower);
  EXPECT_EQ(actual.total, expected.total);
  ASSERT_FALSE(expected.gradients.empty());
  EXPECT_EQ(differing(actual.gradients, expected.gradients, 1e-14), std::vector<std::string>());
  expect_equal_statistics(actual.stats, expected.stats);
}

// Every parameter is in one part; the embedding of MTP modules is in the last one too.
TEST_P(ModelParts, HoldEachParameterOnce) {
  const auto& c = GetParam();
  std::multiset<std::string> held, expected;
  for (const auto& p : tiny_model(three_layers(), c.settings)->parameters())
    expected.insert(p.name);
  for (const auto& part : build(parts_at(c.cuts), c.settings)) {
    for (const auto& p : part->parameters()) held.insert(p.name);
  }
  if (!c.cuts.empty()) expected.insert("model.embed_tokens.weight");
  EXPECT_EQ(held, expected);
}

INSTANTIATE_TEST_SUITE_P(Cuts, ModelParts, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

TEST(ModelPart, InitialWeightsAreThoseOfTheWhole) {
  v3::Model whole(three_layers(), fp64_settings());
  v3::Model middle(three_layers(), fp64_settings(), {1, 2, false, false});
  for (auto* model : {&whole, &middle}) v3::initialize(*model, 42, 0.02, true);
  Tensors all;
  for (const auto& p : whole.parameters()) all[p.name] = *p.tensor;
  ASSERT_FALSE(middle.parameters().empty());
  for (const auto& p : middle.parameters()) EXPECT_TRUE(at::equal(*p.tensor, all.at(p.name)));
  ASSERT_EQ(middle.routers().size(), 1);
  EXPECT_EQ(middle.routers()[0].first, 1);
}

// What `f` complains about; empty if it does not.
template <typename F>
std::string complaint(const F& f) {
  try {
    f();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(ModelPart, SaysWhatItWants) {
  const auto batch = tiny_batch();
  v3::ForwardContext ctx;
  ctx.counts.add(batch);
  v3::Model first(three_layers(), fp64_settings(), {0, 1, true, false});
  v3::Model second(three_layers(), fp64_settings(), {1, 3, false, false});
  const auto hidden = at::zeros({2, kTinySeqLen, 12}, at::kDouble);
  EXPECT_NE(complaint([&] { first.forward(batch, ctx, hidden); }).find("token ids"),
            std::string::npos);
  EXPECT_NE(complaint([&] { second.forward(batch, ctx); }).find("hidden states before it"),
            std::string::npos);
  EXPECT_NE(complaint([&] { second.lm_head(); }).find("no output projection"), std::string::npos);
  EXPECT_NE(complaint([] {
              v3::Model(three_layers(), fp64_settings(), {2, 4, false, false});
            }).find("layers 2 to 4 of a model with 3"),
            std::string::npos);
}

}  // namespace
}  // namespace longhaul::testing
