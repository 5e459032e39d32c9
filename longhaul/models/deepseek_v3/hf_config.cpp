// config.json to ModelConfig and back.
#include <limits>
#include <nlohmann/json.hpp>

#include "longhaul/base/error.h"
#include "longhaul/base/json.h"
#include "longhaul/models/deepseek_v3/model_config.h"

namespace longhaul::deepseek_v3 {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

// A value as it stands in the file, cut where it would fill the screen.
std::string shortened(const json& value) {
  const std::string text = value.dump();
  return text.size() <= 60 ? text : text.substr(0, 57) + "...";
}

// Reads keys of one JSON object; every failure names the file and the key.
class Reader {
 public:
  Reader(const json& object, std::string origin) : object_(object), origin_(std::move(origin)) {}

  // null counts as absent, as in Hugging Face's files.
  bool has(const char* key) const { return object_.contains(key) && !object_[key].is_null(); }

  int64_t integer(const char* key) const {
    const json& value = at(key);
    const bool too_large =
        value.is_number_unsigned() && value.get<uint64_t>() > std::numeric_limits<int32_t>::max();
    if (!value.is_number_integer() || too_large) wrong_type(key, "a (32-bit) integer", value);
    return value.get<int64_t>();
  }

  int64_t integer_or(const char* key, int64_t fallback) const {
    return has(key) ? integer(key) : fallback;
  }

  double number(const char* key) const {
    const json& value = at(key);
    if (!value.is_number()) wrong_type(key, "a number", value);
    return value.get<double>();
  }

  double number_or(const char* key, double fallback) const {
    return has(key) ? number(key) : fallback;
  }

  bool boolean(const char* key) const {
    const json& value = at(key);
    if (!value.is_boolean()) wrong_type(key, "true or false", value);
    return value.get<bool>();
  }

  bool boolean_or(const char* key, bool fallback) const {
    return has(key) ? boolean(key) : fallback;
  }

  std::string text_or(const char* key, const std::string& fallback) const {
    if (!has(key)) return fallback;
    if (!object_[key].is_string()) wrong_type(key, "a string", object_[key]);
    return object_[key].get<std::string>();
  }

  const json& list(const char* key) const {
    const json& value = at(key);
    if (!value.is_array()) wrong_type(key, "a list", value);
    return value;
  }

  Reader object(const char* key) const {
    const json& value = at(key);
    if (!value.is_object()) wrong_type(key, "an object", value);
    return Reader(value, origin_ + ": " + key);
  }

  [[noreturn]] void unsupported(const char* key, const std::string& why) const {
    fail_user("{}: {}: {} is not supported, {}", origin_, key, shortened(object_[key]), why);
  }

 private:
  const json& at(const char* key) const {
    if (!has(key)) fail_user("{}: {}: missing", origin_, key);
    return object_[key];
  }

  [[noreturn]] void wrong_type(const char* key, const char* expected, const json& value) const {
    fail_user("{}: {}: expected {}, got {}", origin_, key, expected, shortened(value));
  }

  const json& object_;
  std::string origin_;
};

json parse_object(const std::string& text, const std::string& origin) {
  json root = parse_json(text, origin);
  if (!root.is_object()) fail_user("{}: expected a JSON object", origin);
  return root;
}

void check_model_type(const Reader& file) {
  const std::string type = file.text_or("model_type", "deepseek_v3");
  if (type != "deepseek_v3" && type != "deepseek_v32") {
    file.unsupported("model_type", "expected \"deepseek_v3\" or \"deepseek_v32\"");
  }
}

// What the model code does not have: each would give other numbers if it were ignored.
void check_unsupported(const Reader& file) {
  if (file.text_or("hidden_act", "silu") != "silu") {
    file.unsupported("hidden_act", "the experts use silu");
  }
  for (const char* bias : {"attention_bias", "mlp_bias"}) {
    if (file.boolean_or(bias, false)) file.unsupported(bias, "projections have no bias");
  }
  if (file.number_or("attention_dropout", 0) != 0) {
    file.unsupported("attention_dropout", "there is no dropout");
  }
  if (file.boolean_or("tie_word_embeddings", false)) {
    file.unsupported("tie_word_embeddings", "the output head has its own weight");
  }
  if (file.integer_or("moe_layer_freq", 1) != 1) {
    file.unsupported("moe_layer_freq", "every layer after the dense ones has experts");
  }
  if (!file.boolean_or("rope_interleave", true)) {
    file.unsupported("rope_interleave", "latent attention rotates interleaved pairs");
  }
  const std::string method = file.text_or("topk_method", "noaux_tc");
  const bool greedy = method == "greedy" && file.integer_or("n_group", 1) == 1;
  if (method != "noaux_tc" && !greedy) {
    file.unsupported("topk_method", "expected \"noaux_tc\", or \"greedy\" without groups");
  }
}

YarnConfig read_yarn(const Reader& rope) {
  if (rope.has("attention_factor")) {
    rope.unsupported("attention_factor", "it follows from mscale and mscale_all_dim");
  }
  if (!rope.boolean_or("truncate", true)) rope.unsupported("truncate", "ramp bounds are whole");
  YarnConfig yarn;
  yarn.factor = rope.number("factor");
  yarn.beta_fast = rope.number_or("beta_fast", yarn.beta_fast);
  yarn.beta_slow = rope.number_or("beta_slow", yarn.beta_slow);
  yarn.mscale = rope.number_or("mscale", yarn.mscale);
  yarn.mscale_all_dim = rope.number_or("mscale_all_dim", yarn.mscale_all_dim);
  yarn.original_max_position_embeddings = rope.integer("original_max_position_embeddings");
  return yarn;
}

void read_rope(const Reader& file, ModelConfig& config) {
  config.rope_theta = file.number_or("rope_theta", config.rope_theta);
  const char* key = file.has("rope_parameters") ? "rope_parameters" : "rope_scaling";
  if (!file.has(key)) return;
  const Reader rope = file.object(key);
  config.rope_theta = rope.number_or("rope_theta", config.rope_theta);
  const char* type_key = rope.has("rope_type") ? "rope_type" : "type";
  const std::string type = rope.text_or(type_key, "default");
  if (type == "yarn") {
    config.yarn = read_yarn(rope);
  } else if (type != "default") {
    rope.unsupported(type_key, "expected \"yarn\" or \"default\"");
  }
}

void read_attention(const Reader& file, ModelConfig& config) {
  config.num_attention_heads = file.integer("num_attention_heads");
  if (file.integer_or("num_key_value_heads", config.num_attention_heads) !=
      config.num_attention_heads) {
    file.unsupported("num_key_value_heads", "it must equal num_attention_heads");
  }
  config.q_lora_rank = file.integer_or("q_lora_rank", 0);
  config.kv_lora_rank = file.integer("kv_lora_rank");
  config.qk_nope_head_dim = file.integer("qk_nope_head_dim");
  config.qk_rope_head_dim = file.integer("qk_rope_head_dim");
  config.v_head_dim = file.integer("v_head_dim");
  read_rope(file, config);
}

void read_indexer(const Reader& file, ModelConfig& config) {
  const bool sparse = file.text_or("model_type", "deepseek_v3") == "deepseek_v32";
  if (!sparse && !file.has("index_n_heads")) return;
  config.index_n_heads = file.integer("index_n_heads");
  config.index_head_dim = file.integer("index_head_dim");
  config.index_topk = file.integer("index_topk");
}

ScoreFunction read_score_function(const Reader& file) {
  const std::string name = file.text_or("scoring_func", "sigmoid");
  if (name == "softmax") return ScoreFunction::kSoftmax;
  if (name != "sigmoid") {
    file.unsupported("scoring_func", "expected \"sigmoid\" or \"softmax\"");
  }
  return ScoreFunction::kSigmoid;
}

// transformers 5 also lists the kind of every layer's MLP; only "dense, then sparse" exists.
void check_layer_kinds(const Reader& file, const ModelConfig& config) {
  if (!file.has("mlp_layer_types")) return;
  const auto& kinds = file.list("mlp_layer_types");
  for (size_t layer = 0; layer < kinds.size(); ++layer) {
    const bool sparse = config.is_moe_layer(static_cast<int64_t>(layer));
    if (kinds[layer] != (sparse ? "sparse" : "dense")) {
      file.unsupported("mlp_layer_types", "it must agree with first_k_dense_replace");
    }
  }
}

void read_experts(const Reader& file, ModelConfig& config) {
  config.n_routed_experts = file.integer_or("n_routed_experts", 0);
  if (config.n_routed_experts > 0) {
    config.first_k_dense_replace = file.integer("first_k_dense_replace");
    config.n_shared_experts = file.integer_or("n_shared_experts", 0);
    config.num_experts_per_tok = file.integer("num_experts_per_tok");
    config.moe_intermediate_size = file.integer("moe_intermediate_size");
    config.n_group = file.integer_or("n_group", 1);
    config.topk_group = file.integer_or("topk_group", config.n_group);
    config.norm_topk_prob = file.boolean("norm_topk_prob");
    config.routed_scaling_factor = file.number("routed_scaling_factor");
    config.scoring_func = read_score_function(file);
  }
  check_layer_kinds(file, config);
}

ordered_json rope_json(const ModelConfig& config) {
  ordered_json rope = {{"rope_type", config.yarn ? "yarn" : "default"},
                       {"rope_theta", config.rope_theta}};
  if (config.yarn) {
    rope["factor"] = config.yarn->factor;
    rope["beta_fast"] = config.yarn->beta_fast;
    rope["beta_slow"] = config.yarn->beta_slow;
    rope["mscale"] = config.yarn->mscale;
    rope["mscale_all_dim"] = config.yarn->mscale_all_dim;
    rope["original_max_position_embeddings"] = config.yarn->original_max_position_embeddings;
  }
  return rope;
}

void write_attention(const ModelConfig& config, ordered_json& out) {
  out["num_attention_heads"] = config.num_attention_heads;
  out["num_key_value_heads"] = config.num_attention_heads;
  out["q_lora_rank"] = config.q_lora_rank > 0 ? ordered_json(config.q_lora_rank) : nullptr;
  out["kv_lora_rank"] = config.kv_lora_rank;
  out["qk_nope_head_dim"] = config.qk_nope_head_dim;
  out["qk_rope_head_dim"] = config.qk_rope_head_dim;
  out["head_dim"] = config.qk_rope_head_dim;
  out["v_head_dim"] = config.v_head_dim;
  out["attention_bias"] = false;
  out["attention_dropout"] = 0.0;
  out["rope_parameters"] = rope_json(config);
  if (config.has_indexer()) {
    out["index_n_heads"] = config.index_n_heads;
    out["index_head_dim"] = config.index_head_dim;
    out["index_topk"] = config.index_topk;
  }
}

void write_experts(const ModelConfig& config, ordered_json& out) {
  out["first_k_dense_replace"] = config.first_k_dense_replace;
  out["moe_layer_freq"] = 1;
  out["n_routed_experts"] = config.n_routed_experts;
  out["n_shared_experts"] = config.n_shared_experts;
  out["num_experts_per_tok"] = config.num_experts_per_tok;
  out["moe_intermediate_size"] = config.moe_intermediate_size;
  out["n_group"] = config.n_group;
  out["topk_group"] = config.topk_group;
  out["norm_topk_prob"] = config.norm_topk_prob;
  out["routed_scaling_factor"] = config.routed_scaling_factor;
  const bool sigmoid = config.scoring_func == ScoreFunction::kSigmoid;
  out["scoring_func"] = sigmoid ? "sigmoid" : "softmax";
  // Inference engines look here for whether there are router biases.
  if (sigmoid) out["topk_method"] = "noaux_tc";
}

}  // namespace

ModelConfig parse_model_config(const std::string& json_text, const std::string& origin) {
  const json root = parse_object(json_text, origin);
  const Reader file(root, origin);
  check_model_type(file);
  check_unsupported(file);
  ModelConfig config;
  config.vocab_size = file.integer("vocab_size");
  config.hidden_size = file.integer("hidden_size");
  config.num_hidden_layers = file.integer("num_hidden_layers");
  config.intermediate_size = file.integer("intermediate_size");
  config.max_position_embeddings =
      file.integer_or("max_position_embeddings", config.max_position_embeddings);
  config.rms_norm_eps = file.number_or("rms_norm_eps", config.rms_norm_eps);
  config.initializer_range = file.number_or("initializer_range", config.initializer_range);
  config.num_nextn_predict_layers = file.integer_or("num_nextn_predict_layers", 0);
  read_attention(file, config);
  read_indexer(file, config);
  read_experts(file, config);
  validate(config, origin);
  return config;
}

std::string to_hf_json(const ModelConfig& config) {
  const bool sparse = config.has_indexer();
  ordered_json out;
  out["architectures"] = {sparse ? "DeepseekV32ForCausalLM" : "DeepseekV3ForCausalLM"};
  out["model_type"] = sparse ? "deepseek_v32" : "deepseek_v3";
  out["vocab_size"] = config.vocab_size;
  out["hidden_size"] = config.hidden_size;
  out["num_hidden_layers"] = config.num_hidden_layers;
  out["intermediate_size"] = config.intermediate_size;
  out["hidden_act"] = "silu";
  out["max_position_embeddings"] = config.max_position_embeddings;
  out["rms_norm_eps"] = config.rms_norm_eps;
  out["initializer_range"] = config.initializer_range;
  out["tie_word_embeddings"] = config.tie_word_embeddings;
  write_attention(config, out);
  write_experts(config, out);
  out["num_nextn_predict_layers"] = config.num_nextn_predict_layers;
  return out.dump(2) + "\n";
}

}  // namespace longhaul::deepseek_v3
