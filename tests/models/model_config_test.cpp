// config.json files and flavors: the shapes that come out, and the error for what cannot be built.
#include "longhaul/models/deepseek_v3/model_config.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "longhaul/base/error.h"
#include "tests/support/temp_folder.h"

namespace longhaul::deepseek_v3 {
namespace {

using nlohmann::json;

// The form of the published folders: rope_theta and rope_scaling, FP8 quantization, extra keys.
const char* const kPublished = R"({
  "architectures": ["DeepseekV32ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3,
  "hidden_act": "silu", "hidden_size": 7168, "index_head_dim": 128, "index_n_heads": 64,
  "index_topk": 2048, "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512,
  "max_position_embeddings": 163840, "model_type": "deepseek_v32", "moe_intermediate_size": 2048,
  "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
  "norm_topk_prob": true, "num_attention_heads": 128, "num_experts_per_tok": 8,
  "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
  "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
  "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
  "rms_norm_eps": 1e-06,
  "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0,
                   "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
                   "type": "yarn"},
  "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
  "tie_word_embeddings": false, "topk_group": 4, "topk_method": "noaux_tc",
  "torch_dtype": "bfloat16", "use_cache": true, "v_head_dim": 128, "vocab_size": 129280})";

TEST(ModelConfig, ThePublishedFileIsThe671BFlavor) {
  ModelConfig published = parse_model_config(kPublished, "config.json");
  EXPECT_EQ(published.initializer_range, 0.02);
  published.initializer_range = 0.006;  // the report's value, which the flavor has
  EXPECT_EQ(published, find_flavor("deepseek_v32", "671B"));
  EXPECT_EQ(published.yarn->factor, 40);
  EXPECT_EQ(published.yarn->mscale_all_dim, 1);
  EXPECT_EQ(published.qk_head_dim(), 192);
  EXPECT_FALSE(published.is_moe_layer(2));
  EXPECT_TRUE(published.is_moe_layer(3));
}

TEST(ModelConfig, EveryFlavorIsValidAndSurvivesHuggingFacesForm) {
  EXPECT_EQ(flavors().size(), 12u);
  for (const auto& flavor : flavors()) {
    const ModelConfig config = find_flavor(flavor.model_name, flavor.name);
    EXPECT_EQ(config.has_indexer(), flavor.model_name == "deepseek_v32") << flavor.name;
    const std::string text = to_hf_json(config);
    EXPECT_EQ(parse_model_config(text, "exported"), config) << flavor.name;
    EXPECT_EQ(json::parse(text)["model_type"], flavor.model_name);
    EXPECT_EQ(json::parse(text)["rope_parameters"]["rope_type"], config.yarn ? "yarn" : "default");
  }
}

TEST(ModelConfig, ShapesOfTheFlavors) {
  const ModelConfig small = find_flavor("deepseek_v32", "50M");
  EXPECT_EQ(small.hidden_size, 512);
  EXPECT_EQ(small.n_routed_experts, 16);
  EXPECT_EQ(small.index_topk, 256);
  EXPECT_FALSE(small.yarn.has_value());
  const ModelConfig lite = find_flavor("deepseek_v32", "16B");
  EXPECT_EQ(lite.q_lora_rank, 0);
  EXPECT_EQ(lite.scoring_func, ScoreFunction::kSoftmax);
  EXPECT_FALSE(lite.norm_topk_prob);
  const ModelConfig recipe = find_flavor("deepseek_v32", "671B_debug_128die");
  EXPECT_EQ(recipe.num_hidden_layers, 61);
  EXPECT_EQ(recipe.n_group, 1);
  EXPECT_EQ(recipe.routed_scaling_factor, 2.5);
  const ModelConfig debug = find_flavor("deepseek_v3", "debugmodel");
  EXPECT_EQ(debug.vocab_size, 2048);
  EXPECT_EQ(debug.num_experts_per_tok, 3);
  EXPECT_EQ(find_flavor("deepseek_v3", "236B").topk_group, 3);
}

TEST(ModelConfig, UnknownFlavors) {
  EXPECT_EQ(test::error_of<UserError>([] { find_flavor("deepseek_v32", "671b"); }),
            "deepseek_v32 has no flavor '671b', did you mean '671B'?; there are 16B, 50M, 671B, "
            "671B_debug_128die, debugmodel, small, tiny");
  EXPECT_EQ(test::error_of<UserError>([] { find_flavor("deepseek_v23", "tiny"); }),
            "unknown model 'deepseek_v23', did you mean 'deepseek_v3'?; there are deepseek_v3, "
            "deepseek_v32");
}

// The published file with one key changed, or without it.
std::string error_with(const std::string& key, const json& value) {
  json file = json::parse(kPublished);
  file[key] = value;
  return test::error_of<UserError>([&] { parse_model_config(file.dump(), "config.json"); });
}

std::string error_without(const std::string& key) {
  json file = json::parse(kPublished);
  file.erase(key);
  return test::error_of<UserError>([&] { parse_model_config(file.dump(), "config.json"); });
}

TEST(ModelConfig, WhatIsMissingOrOfAWrongType) {
  EXPECT_EQ(error_without("hidden_size"), "config.json: hidden_size: missing");
  EXPECT_EQ(error_with("index_topk", nullptr), "config.json: index_topk: missing");
  EXPECT_EQ(error_with("hidden_size", "big"),
            "config.json: hidden_size: expected a (32-bit) integer, got \"big\"");
  EXPECT_EQ(error_with("hidden_size", 64.5),
            "config.json: hidden_size: expected a (32-bit) integer, got 64.5");
  EXPECT_EQ(error_with("vocab_size", 18446744073709551615ull),
            "config.json: vocab_size: expected a (32-bit) integer, got 18446744073709551615");
  EXPECT_EQ(error_with("norm_topk_prob", 1),
            "config.json: norm_topk_prob: expected true or false, got 1");
  EXPECT_EQ(error_with("rope_scaling", "yarn"),
            "config.json: rope_scaling: expected an object, got \"yarn\"");
}

TEST(ModelConfig, WhatTheModelDoesNotHave) {
  EXPECT_EQ(error_with("model_type", "llama"),
            "config.json: model_type: \"llama\" is not supported, expected \"deepseek_v3\" or "
            "\"deepseek_v32\"");
  EXPECT_EQ(error_with("hidden_act", "gelu"),
            "config.json: hidden_act: \"gelu\" is not supported, the experts use silu");
  EXPECT_EQ(error_with("attention_bias", true),
            "config.json: attention_bias: true is not supported, projections have no bias");
  EXPECT_EQ(error_with("tie_word_embeddings", true),
            "config.json: tie_word_embeddings: true is not supported, the output head has its own "
            "weight");
  EXPECT_EQ(error_with("topk_method", "group_limited_greedy"),
            "config.json: topk_method: \"group_limited_greedy\" is not supported, expected "
            "\"noaux_tc\", or \"greedy\" without groups");
  EXPECT_EQ(error_with("rope_scaling", {{"type", "linear"}, {"factor", 2}}),
            "config.json: rope_scaling: type: \"linear\" is not supported, expected \"yarn\" or "
            "\"default\"");
  EXPECT_EQ(error_with("mlp_layer_types", {"dense", "sparse"}),
            "config.json: mlp_layer_types: [\"dense\",\"sparse\"] is not supported, it must agree "
            "with first_k_dense_replace");
  EXPECT_EQ(error_with("num_key_value_heads", 8),
            "config.json: num_key_value_heads: 8 is not supported, it must equal "
            "num_attention_heads");
}

TEST(ModelConfig, SizesThatContradictEachOther) {
  EXPECT_EQ(error_with("hidden_size", 0),
            "config.json: hidden_size: 0 is out of range, expected >= 1");
  EXPECT_EQ(error_with("q_lora_rank", -1),
            "config.json: q_lora_rank: -1 is out of range, expected >= 0");
  EXPECT_EQ(error_with("n_group", 7),
            "config.json: n_group: 7 does not divide n_routed_experts 256");
  EXPECT_EQ(error_with("topk_group", 9), "config.json: topk_group: 9 is larger than n_group 8");
  EXPECT_EQ(error_with("num_experts_per_tok", 129),
            "config.json: num_experts_per_tok: 129 does not fit into the 128 experts of topk_group "
            "4 of 8");
  EXPECT_EQ(error_with("qk_rope_head_dim", 63),
            "config.json: qk_rope_head_dim: 63 is odd, but rotations take pairs");
  EXPECT_EQ(error_with("index_head_dim", 32),
            "config.json: index_head_dim: 32 is smaller than qk_rope_head_dim 64, which it must "
            "hold");
}

TEST(ModelConfig, BrokenFiles) {
  const std::string cut =
      test::error_of<UserError>([] { parse_model_config("{\n\"a\": 1,\n", "config.json"); });
  EXPECT_EQ(cut.find("config.json:3: not valid JSON"), 0u) << cut;
  EXPECT_EQ(test::error_of<UserError>([] { parse_model_config("[1]", "config.json"); }),
            "config.json: expected a JSON object");
}

}  // namespace
}  // namespace longhaul::deepseek_v3
