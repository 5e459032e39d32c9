// The mixture of experts inside the model: the router's bias, counts, forced balance, and the
// values of the balance and z losses.
#include <ATen/core/grad_mode.h>
#include <gmock/gmock.h>

#include <cmath>

#include "tests/models/tiny_model.h"

namespace longhaul::testing {
namespace {

using ::testing::ElementsAre;

constexpr int64_t kMoeLayer = 1;

using Seen = std::map<std::string, at::Tensor>;

// What the router of `kMoeLayer` computes.
Seen routing(const v3::Model& model, const v3::Batch& batch, v3::StepStats* stats = nullptr) {
  const at::NoGradGuard no_grad;
  Seen seen;
  v3::ForwardContext ctx;
  ctx.counts.add(batch);
  ctx.stats = stats;
  ctx.probe = [&](const std::string& name, int64_t layer, const at::Tensor& x) {
    if (layer == kMoeLayer) seen[name] = x.detach();
  };
  model.forward(batch, ctx);
  return seen;
}

TEST(RouterBias, IsABufferOfEveryRouterAlsoInMtp) {
  const auto model = tiny_model();
  std::vector<std::string> names;
  for (const auto& buffer : model->buffers()) names.push_back(buffer.name);
  EXPECT_THAT(names, ElementsAre("model.layers.1.mlp.gate.e_score_correction_bias",
                                 "model.layers.2.mlp.gate.e_score_correction_bias",
                                 "model.layers.3.mlp.gate.e_score_correction_bias"));
  std::vector<int64_t> layers;
  for (const auto& [layer, router] : model->routers()) layers.push_back(layer);
  EXPECT_THAT(layers, ElementsAre(1, 2, 3));
  for (const auto& buffer : model->buffers()) EXPECT_FALSE(buffer.tensor->requires_grad());
}

TEST(RouterBias, StaysFp32WithNarrowWeights) {
  v3::ModelSettings settings;
  settings.param_dtype = settings.compute_dtype = at::kBFloat16;
  v3::Model model(tiny_config(), settings);
  for (const auto& buffer : model.buffers()) EXPECT_EQ(buffer.tensor->scalar_type(), at::kFloat);
}

TEST(RouterBias, SoftmaxRoutersHaveNone) {
  auto config = tiny_config();
  config.scoring_func = v3::ScoreFunction::kSoftmax;
  const auto model = tiny_model(config);
  EXPECT_TRUE(model->buffers().empty());
  EXPECT_FALSE(model->routers()[0].second->bias().defined());
}

TEST(RouterBias, ChangesTheChoiceNotTheWeights) {
  const auto model = tiny_model();
  const auto batch = tiny_batch();
  const auto before = routing(*model, batch);
  model->routers()[0].second->bias()[5] = 100.0;
  const auto after = routing(*model, batch);
  const auto valid = batch.towers[0].valid.flatten();
  EXPECT_TRUE(at::equal(before.at("router_logits"), after.at("router_logits")));
  EXPECT_TRUE((after.at("router_experts") == 5).any(-1).eq(valid).all().item<bool>());
  const auto scores = after.at("router_logits").sigmoid();
  const auto experts = after.at("router_experts").clamp_max(5);
  auto expected = scores.gather(1, experts);
  expected = expected / expected.sum(-1, true) * 2.5 * valid.unsqueeze(-1);
  EXPECT_LT(max_difference(after.at("router_weights"), expected), 1e-14);
}

TEST(ExpertCounts, EachTokenOnceAndPaddingNever) {
  const auto model = tiny_model();
  const auto batch = tiny_batch();
  v3::StepStats stats;
  const auto seen = routing(*model, batch, &stats);
  const auto experts = seen.at("router_experts");
  for (int64_t e = 0; e < 6; ++e) {
    EXPECT_EQ(stats.expert_counts.at(kMoeLayer)[e].item<int64_t>(),
              experts.eq(e).sum().item<int64_t>());
  }
  EXPECT_EQ(stats.expert_counts.size(), 3U) << "one MoE layer, two MTP modules";
  const auto padding = batch.towers[0].valid.flatten().logical_not();
  EXPECT_TRUE((experts.index({padding}) == 6).all().item<bool>());
  EXPECT_EQ(seen.at("router_weights").index({padding}).abs().max().item<double>(), 0.0);
  // A second micro-batch adds up.
  routing(*model, batch, &stats);
  EXPECT_EQ(stats.expert_counts.at(kMoeLayer).sum().item<int64_t>(),
            2 * 2 * batch.towers[0].num_tokens);
}

TEST(ForceLoadBalance, GivesEachExpertItsTurn) {
  auto settings = fp64_settings();
  settings.force_load_balance = true;
  const auto model = tiny_model(tiny_config(), settings);
  const auto d = documents({12});
  const auto batch = pack({{d[0]}}, 12).batch(12);
  const auto r = run(*model, batch);
  EXPECT_TRUE(at::equal(r.stats.expert_counts.at(kMoeLayer), at::full({6}, 4, at::kLong)));
  // Weights still come from the scores, so the router learns.
  EXPECT_GT(r.gradients.at("model.layers.1.mlp.gate.weight").abs().max().item<double>(), 1e-6);
  const auto seen = routing(*model, batch);
  const auto chosen = seen.at("router_logits").sigmoid().gather(1, seen.at("router_experts"));
  EXPECT_LT(max_difference(seen.at("router_weights"), chosen / chosen.sum(-1, true) * 2.5), 1e-14);
}

// alpha / T * sum over rows of T_row * sum_i f_i P_i, from logits and choices, in loops.
double balance_by_hand(const Seen& seen, const v3::Slots& slots, bool softmax, double alpha) {
  const int64_t B = slots.valid.size(0), S = slots.valid.size(1), E = 6, k = 2;
  const auto logits = seen.at("router_logits").view({B, S, E});
  const auto experts = seen.at("router_experts").view({B, S, k});
  double loss = 0;
  for (int64_t b = 0; b < B; ++b) {
    std::vector<double> chosen(E, 0), share(E, 0);
    double tokens = 0;
    for (int64_t t = 0; t < S; ++t) {
      if (!slots.valid[b][t].item<bool>()) continue;
      tokens += 1;
      double sum = 0;
      std::vector<double> score(E);
      for (int64_t e = 0; e < E; ++e) {
        const double x = std::exp(logits[b][t][e].item<double>());
        sum += score[e] = softmax ? x : x / (1 + x);
      }
      for (int64_t e = 0; e < E; ++e) share[e] += score[e] / sum;
      for (int64_t i = 0; i < k; ++i) chosen[experts[b][t][i].item<int64_t>()] += 1;
    }
    double row = 0;
    for (int64_t e = 0; e < E; ++e) {
      row += (E / (k * tokens) * chosen[e]) * (share[e] / tokens);
    }
    loss += row * tokens / static_cast<double>(slots.num_tokens);
  }
  return alpha * loss;
}

TEST(RouterLosses, ValuesEqualTheFormulas) {
  for (const bool softmax : {false, true}) {
    auto config = tiny_config();
    if (softmax) config.scoring_func = v3::ScoreFunction::kSoftmax;
    auto settings = fp64_settings();
    settings.sequence_balance_loss_coeff = 0.3;
    settings.z_loss_coeff = 0.7;
    const auto model = tiny_model(config, settings);
    const auto batch = tiny_batch();
    v3::StepStats stats;
    const auto seen = routing(*model, batch, &stats);
    const auto& slots = batch.towers[0];
    EXPECT_NEAR(stats.balance_loss.at(kMoeLayer).item<double>(),
                balance_by_hand(seen, slots, softmax, 0.3), 1e-13);
    double z = 0;
    const auto valid = slots.valid.flatten();
    for (int64_t t = 0; t < valid.size(0); ++t) {
      if (!valid[t].item<bool>()) continue;
      const double log_sum = std::log(seen.at("router_logits")[t].exp().sum().item<double>());
      z += log_sum * log_sum / static_cast<double>(slots.num_tokens);
    }
    EXPECT_NEAR(stats.z_loss.at(kMoeLayer).item<double>(), 0.7 * z, 1e-13);
    EXPECT_EQ(stats.balance_loss.size(), 3U);
  }
}

// Scores far below any epsilon do not cheat the balance loss: shares are relative.
TEST(RouterLosses, TinyScoresStillCount) {
  auto settings = fp64_settings();
  settings.sequence_balance_loss_coeff = 1.0;
  settings.force_load_balance = true;  // f_i = 1: the loss is then the sum of the shares, 1
  const auto model = tiny_model(tiny_config(), settings);
  for (const auto& parameter : model->parameters()) {
    if (parameter.name == "model.layers.1.mlp.gate.weight") {
      const at::NoGradGuard no_grad;
      parameter.tensor->fill_(0);
    }
  }
  const auto d = documents({12});
  const auto batch = pack({{d[0]}}, 12).batch(12);
  EXPECT_NEAR(run(*model, batch).stats.balance_loss.at(kMoeLayer).item<double>(), 1.0, 1e-13);
}

// Everything goes to one expert of each group; the others get a gradient of exactly zero.
TEST(Experts, WithoutTokensHaveAZeroGradient) {
  const auto model = tiny_model();
  auto& bias = model->routers()[0].second->bias();
  bias.zero_();
  bias[0] = bias[1] = 100.0;
  const auto r = run(*model, tiny_batch());
  for (int64_t e = 0; e < 6; ++e) {
    const auto& gradient =
        r.gradients.at(fmt::format("model.layers.1.mlp.experts.{}.up_proj.weight", e));
    EXPECT_EQ(gradient.abs().max().item<double>() > 0, e < 2) << e;
  }
}

}  // namespace
}  // namespace longhaul::testing
