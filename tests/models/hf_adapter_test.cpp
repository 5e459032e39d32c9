// Reading weights: everything is checked by name and shape before anything is written.
#include "longhaul/models/deepseek_v3/hf_adapter.h"

#include <gmock/gmock.h>

#include <map>

#include "longhaul/base/error.h"
#include "tests/models/tiny_model.h"
#include "tests/support/hf_tensors.h"
#include "tests/support/log_capture.h"

namespace longhaul::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

std::string load_error(v3::Model& model, const Tensors& tensors) {
  try {
    v3::load_hf(model, source_of(tensors));
  } catch (const UserError& error) {
    return error.what();
  }
  return "";
}

TEST(HfViews, ExpertsOneByOneOthersAsTheyAre) {
  const auto stacked = normal({3, 2, 4}, 1);
  const auto views = v3::hf_views("model.layers.1.mlp.experts.up_proj.weight", stacked);
  ASSERT_EQ(views.size(), 3U);
  EXPECT_EQ(views[2].first, "model.layers.1.mlp.experts.2.up_proj.weight");
  EXPECT_TRUE(at::equal(views[2].second, stacked[2]));
  views[2].second.zero_();
  EXPECT_EQ(stacked[2].abs().max().item<double>(), 0.0) << "views, not copies";
  EXPECT_EQ(v3::hf_views("lm_head.weight", stacked).size(), 1U);
  EXPECT_EQ(v3::hf_views("model.layers.1.mlp.shared_experts.up_proj.weight", stacked).size(), 1U);
}

// All tensors of a layer of DeepSeek-V3.2-Exp, a dense one's MLP, and what stands around the
// layers.
TEST(PublishedDtype, OfEveryTensor) {
  const std::map<at::ScalarType, std::vector<std::string>> published = {
      {at::kFloat8_e4m3fn,
       {"self_attn.q_a_proj.weight", "self_attn.q_b_proj.weight", "self_attn.q_proj.weight",
        "self_attn.kv_a_proj_with_mqa.weight", "self_attn.kv_b_proj.weight",
        "self_attn.o_proj.weight", "self_attn.indexer.wq_b.weight", "self_attn.indexer.wk.weight",
        "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight",
        "mlp.experts.255.gate_proj.weight", "mlp.experts.0.up_proj.weight",
        "mlp.experts.7.down_proj.weight", "mlp.shared_experts.gate_proj.weight",
        "mlp.shared_experts.up_proj.weight", "mlp.shared_experts.down_proj.weight"}},
      {at::kFloat,
       {"mlp.gate.e_score_correction_bias", "self_attn.indexer.k_norm.weight",
        "self_attn.indexer.k_norm.bias"}},
      {at::kBFloat16,
       {"input_layernorm.weight", "post_attention_layernorm.weight",
        "self_attn.q_a_layernorm.weight", "self_attn.kv_a_layernorm.weight",
        "self_attn.indexer.weights_proj.weight", "mlp.gate.weight", "eh_proj.weight",
        "enorm.weight", "hnorm.weight", "embed_tokens.weight", "shared_head.norm.weight",
        "shared_head.head.weight"}}};
  for (const auto& [dtype, names] : published) {
    for (const auto& name : names) {
      EXPECT_EQ(v3::published_dtype("model.layers.61." + name), dtype) << name;
    }
  }
  for (const char* name : {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}) {
    EXPECT_EQ(v3::published_dtype(name), at::kBFloat16) << name;
  }
}

TEST(LoadHf, RoundTrip) {
  const auto source = tiny_model();
  const auto weights = hf_tensors(*source);
  v3::Model target(tiny_config(), fp64_settings());
  v3::load_hf(target, source_of(weights));
  const auto loaded = hf_tensors(target);
  ASSERT_EQ(loaded.size(), weights.size());
  for (const auto& [name, value] : weights) EXPECT_TRUE(at::equal(loaded.at(name), value)) << name;
  for (const auto& parameter : target.parameters()) {
    EXPECT_TRUE(parameter.tensor->is_leaf() && parameter.tensor->requires_grad()) << parameter.name;
  }
}

TEST(LoadHf, ListsEveryProblemAndWritesNothing) {
  const auto model = tiny_model();
  const auto before = hf_tensors(*model);
  auto weights = hf_tensors(*model);
  for (auto& [name, value] : weights) value = value + 1;
  weights.erase("model.norm.weight");
  weights.erase("model.layers.1.mlp.experts.3.up_proj.weight");
  weights["model.layers.0.self_attn.q_proj.weight"] = at::zeros({2, 2});
  weights["lm_head.weight"] = at::zeros({24, 12});
  const auto message = load_error(*model, weights);
  EXPECT_THAT(message, AllOf(HasSubstr("missing: model.layers.1.mlp.experts.3.up_proj.weight, "
                                       "model.norm.weight"),
                             HasSubstr("unexpected: model.layers.0.self_attn.q_proj.weight"),
                             HasSubstr("lm_head.weight is [24, 12], the model wants [23, 12]"),
                             HasSubstr("model.flavor"), Not(HasSubstr("\n"))));
  for (const auto& [name, value] : hf_tensors(*model)) {
    EXPECT_TRUE(at::equal(value, before.at(name))) << name << " was written";
  }
}

TEST(LoadHf, LongListsAreCut) {
  const auto model = tiny_model();
  auto weights = hf_tensors(*model);
  for (int i = 10; i < 60; ++i) weights[fmt::format("model.spare.{}", i)] = at::zeros({1});
  EXPECT_THAT(
      load_error(*model, weights),
      AllOf(HasSubstr("model.spare.10"), HasSubstr("model.spare.59"), Not(HasSubstr("..."))));
  weights["model.spare.60"] = at::zeros({1});
  EXPECT_THAT(load_error(*model, weights), HasSubstr("model.spare.59, ... (51 in all)"));
}

TEST(LoadHf, AMissingRouterBiasIsNamed) {
  const auto model = tiny_model();
  auto weights = hf_tensors(*model);
  weights.erase("model.layers.1.mlp.gate.e_score_correction_bias");
  EXPECT_THAT(load_error(*model, weights),
              HasSubstr("missing: model.layers.1.mlp.gate.e_score_correction_bias"));
}

// Published folders carry an MTP layer with copies of the embedding and the head.
TEST(LoadHf, SpareMtpLayers) {
  auto config = tiny_config();
  auto weights = hf_tensors(*tiny_model());
  for (const auto* name : {"embed_tokens.weight", "shared_head.head.weight"}) {
    weights[std::string("model.layers.2.") + name] = at::zeros({23, 12});
  }
  weights["model.layers.2.shared_head.norm.weight"] = at::zeros({12});
  v3::Model with(config, fp64_settings());
  EXPECT_EQ(load_error(with, weights), "");
  config.num_nextn_predict_layers = 0;
  v3::Model without(config, fp64_settings());
  EXPECT_EQ(load_error(without, weights), "");
  // The same name in the trunk is not spare.
  weights["model.layers.1.embed_tokens.weight"] = at::zeros({23, 12});
  EXPECT_THAT(load_error(without, weights),
              HasSubstr("unexpected: model.layers.1.embed_tokens.weight"));
}

TEST(LoadHf, ADeeperTrunkIsAnotherModel) {
  auto deeper = tiny_config();
  deeper.num_hidden_layers = 3;
  deeper.num_nextn_predict_layers = 0;
  const auto weights = hf_tensors(*tiny_model(deeper));
  auto config = tiny_config();
  config.num_nextn_predict_layers = 0;
  v3::Model shallow(config, fp64_settings());
  EXPECT_THAT(load_error(shallow, weights), HasSubstr("unexpected: model.layers.2."));
}

// Nothing is dropped in silence: copies that differ are named, equal ones are not worth a word.
TEST(LoadHf, MtpCopiesThatDifferAreNamed) {
  const auto source = tiny_model();
  auto weights = hf_tensors(*source);
  const std::string layer = "model.layers.3.";
  weights[layer + "embed_tokens.weight"] = weights.at("model.embed_tokens.weight").clone();
  weights[layer + "shared_head.head.weight"] = weights.at("lm_head.weight").to(at::kFloat);
  weights[layer + "shared_head.norm.weight"] = weights.at("model.norm.weight") + 1;
  v3::Model target(tiny_config(), fp64_settings());
  const auto logged = [&] {
    const test::LogCapture log;
    EXPECT_EQ(load_error(target, weights), "");
    return log.text();
  };
  EXPECT_THAT(logged(), AllOf(HasSubstr(layer + "shared_head.head.weight (here lm_head.weight)"),
                              HasSubstr(layer + "shared_head.norm.weight (here model.norm.weight)"),
                              HasSubstr("mtp.own_norm"), Not(HasSubstr("embed_tokens"))));
  weights[layer + "shared_head.head.weight"] = weights.at("lm_head.weight").clone();
  weights.erase(layer + "shared_head.norm.weight");
  EXPECT_EQ(logged(), "");
}

// A model whose MTP layers have norms of their own reads them.
TEST(LoadHf, MtpNormsOfTheirOwn) {
  auto settings = fp64_settings();
  settings.mtp_own_norm = true;
  const auto source = tiny_model(tiny_config(), settings);
  const auto weights = hf_tensors(*source);
  ASSERT_TRUE(weights.contains("model.layers.3.shared_head.norm.weight"));
  v3::Model target(tiny_config(), settings);
  EXPECT_EQ(load_error(target, weights), "");
  EXPECT_TRUE(at::equal(hf_tensors(target).at("model.layers.3.shared_head.norm.weight"),
                        weights.at("model.layers.3.shared_head.norm.weight")));
}

TEST(LoadHf, WhatTheSourceFindsWrongIsListedWithTheRest) {
  const auto model = tiny_model();
  auto weights = hf_tensors(*model);
  weights.erase("model.norm.weight");
  auto source = source_of(weights);
  source.problem = [](const std::string& name) {
    return name == "lm_head.weight" ? "lm_head.weight_scale_inv is missing" : "";
  };
  EXPECT_THAT(
      message_of([&] { v3::load_hf(*model, source); }),
      HasSubstr("(missing: model.norm.weight; scales: lm_head.weight_scale_inv is missing)"));
}

TEST(LoadHf, ConvertsTheDtype) {
  const auto source = tiny_model();
  const auto weights = hf_tensors(*source);
  v3::ModelSettings settings;
  settings.param_dtype = at::kBFloat16;
  v3::Model target(tiny_config(), settings);
  v3::load_hf(target, source_of(weights));
  for (const auto& [name, value] : hf_tensors(target)) {
    EXPECT_TRUE(at::equal(value, weights.at(name).to(value.scalar_type()))) << name;
  }
}

}  // namespace
}  // namespace longhaul::testing
