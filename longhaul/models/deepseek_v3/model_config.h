// The shape of a DeepSeek-V3 / V3.2 model, in the words of Hugging Face's config.json. It comes
// from a config.json or from a flavor, which is a config.json that is built into the binary
// (flavors/<model name>/<flavor>.json). Knows no tensors; read by the model, the HF adapter, the
// FLOP count, the trainer and the command line.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace longhaul::deepseek_v3 {

// YaRN (Peng et al., 2023), as in config.json's rope_scaling / rope_parameters.
struct YarnConfig {
  double factor = 1.0;
  double beta_fast = 32.0;
  double beta_slow = 1.0;
  double mscale = 1.0;
  double mscale_all_dim = 0.0;
  int64_t original_max_position_embeddings = 4096;

  bool operator==(const YarnConfig&) const = default;
};

enum class ScoreFunction { kSigmoid, kSoftmax };

struct ModelConfig {
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;  // D
  int64_t num_hidden_layers = 0;
  int64_t first_k_dense_replace = 0;  // layers 0 .. k-1 have a dense MLP
  int64_t intermediate_size = 0;      // of the dense MLP
  int64_t max_position_embeddings = 4096;
  double rms_norm_eps = 1e-6;
  double initializer_range = 0.02;
  bool tie_word_embeddings = false;  // true is refused by the readers

  // Multi-head latent attention.
  int64_t num_attention_heads = 0;  // H
  int64_t q_lora_rank = 0;          // 0: none (config.json: null)
  int64_t kv_lora_rank = 0;         // C
  int64_t qk_nope_head_dim = 0;     // N
  int64_t qk_rope_head_dim = 0;     // R
  int64_t v_head_dim = 0;           // V
  double rope_theta = 10000.0;
  std::optional<YarnConfig> yarn;

  // Lightning indexer (DeepSeek-V3.2). index_n_heads = 0: dense attention (DeepSeek-V3).
  int64_t index_n_heads = 0;   // Hi
  int64_t index_head_dim = 0;  // Di
  int64_t index_topk = 0;      // K

  // Mixture of experts.
  int64_t n_routed_experts = 0;  // E
  int64_t n_shared_experts = 0;
  int64_t num_experts_per_tok = 0;
  int64_t moe_intermediate_size = 0;
  int64_t n_group = 1;
  int64_t topk_group = 1;
  bool norm_topk_prob = true;
  double routed_scaling_factor = 1.0;
  ScoreFunction scoring_func = ScoreFunction::kSigmoid;

  int64_t num_nextn_predict_layers = 0;  // multi-token prediction depth

  bool has_indexer() const { return index_n_heads > 0; }
  bool is_moe_layer(int64_t layer) const {
    return layer >= first_k_dense_replace && n_routed_experts > 0;
  }
  int64_t qk_head_dim() const { return qk_nope_head_dim + qk_rope_head_dim; }

  bool operator==(const ModelConfig&) const = default;
};

// Reads a config.json's text. Accepts `rope_parameters` (transformers 5) and `rope_theta` +
// `rope_scaling` (published folders); `scoring_func` defaults to sigmoid for deepseek_v3 and
// deepseek_v32. Throws UserError that names `origin` and the key for what is missing, of a wrong
// type, out of range or unsupported (attention_bias, tied embeddings, other rope types, an
// activation that is not silu, ...).
ModelConfig parse_model_config(const std::string& json_text, const std::string& origin);

// The config.json of transformers 5 that describes `config` (for exports and run folders).
std::string to_hf_json(const ModelConfig& config);

// Throws UserError if sizes contradict each other (n_group divides experts, topk_group <= n_group,
// num_experts_per_tok fits into the kept groups, rope dims even, ...). Called by the readers.
void validate(const ModelConfig& config, const std::string& origin);

struct Flavor {
  std::string model_name;  // deepseek_v3 | deepseek_v32
  std::string name;        // debugmodel, 16B, ...
  std::string json;        // a config.json
};

// Every built-in flavor, sorted by model name and flavor name.
const std::vector<Flavor>& flavors();

// The flavor's config. Throws UserError with the nearest names when there is none.
ModelConfig find_flavor(const std::string& model_name, const std::string& flavor);

}  // namespace longhaul::deepseek_v3
