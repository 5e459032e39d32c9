#include "longhaul/models/deepseek_v3/model_config.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "longhaul/base/error.h"
#include "longhaul/base/text.h"

namespace longhaul::deepseek_v3 {
namespace {

struct Size {
  const char* key;
  int64_t value;
};

void check_positive(std::initializer_list<Size> sizes, const std::string& origin) {
  for (const auto& [key, value] : sizes) {
    if (value < 1) fail_user("{}: {}: {} is out of range, expected >= 1", origin, key, value);
  }
}

void check_not_negative(std::initializer_list<Size> sizes, const std::string& origin) {
  for (const auto& [key, value] : sizes) {
    if (value < 0) fail_user("{}: {}: {} is out of range, expected >= 0", origin, key, value);
  }
}

void check_attention(const ModelConfig& c, const std::string& origin) {
  check_positive({{"num_attention_heads", c.num_attention_heads},
                  {"kv_lora_rank", c.kv_lora_rank},
                  {"qk_nope_head_dim", c.qk_nope_head_dim},
                  {"qk_rope_head_dim", c.qk_rope_head_dim},
                  {"v_head_dim", c.v_head_dim}},
                 origin);
  check_not_negative({{"q_lora_rank", c.q_lora_rank}}, origin);
  if (c.qk_rope_head_dim % 2 != 0) {
    fail_user("{}: qk_rope_head_dim: {} is odd, but rotations take pairs", origin,
              c.qk_rope_head_dim);
  }
  if (c.rope_theta <= 1) {
    fail_user("{}: rope_theta: {} is out of range, expected > 1", origin, c.rope_theta);
  }
  if (c.yarn && (c.yarn->factor < 1 || c.yarn->original_max_position_embeddings < 1)) {
    fail_user("{}: rope_parameters: factor {} and original_max_position_embeddings {} must be >= 1",
              origin, c.yarn->factor, c.yarn->original_max_position_embeddings);
  }
}

void check_indexer(const ModelConfig& c, const std::string& origin) {
  check_not_negative({{"index_n_heads", c.index_n_heads}}, origin);
  if (!c.has_indexer()) return;
  check_positive({{"index_head_dim", c.index_head_dim}, {"index_topk", c.index_topk}}, origin);
  if (c.index_head_dim < c.qk_rope_head_dim) {
    fail_user("{}: index_head_dim: {} is smaller than qk_rope_head_dim {}, which it must hold",
              origin, c.index_head_dim, c.qk_rope_head_dim);
  }
}

void check_experts(const ModelConfig& c, const std::string& origin) {
  check_not_negative(
      {{"n_routed_experts", c.n_routed_experts}, {"n_shared_experts", c.n_shared_experts}}, origin);
  if (c.n_routed_experts == 0) return;
  check_positive({{"num_experts_per_tok", c.num_experts_per_tok},
                  {"moe_intermediate_size", c.moe_intermediate_size},
                  {"n_group", c.n_group},
                  {"topk_group", c.topk_group}},
                 origin);
  if (c.n_routed_experts % c.n_group != 0) {
    fail_user("{}: n_group: {} does not divide n_routed_experts {}", origin, c.n_group,
              c.n_routed_experts);
  }
  if (c.topk_group > c.n_group) {
    fail_user("{}: topk_group: {} is larger than n_group {}", origin, c.topk_group, c.n_group);
  }
  const int64_t kept = c.n_routed_experts / c.n_group * c.topk_group;
  if (c.num_experts_per_tok > kept) {
    fail_user("{}: num_experts_per_tok: {} does not fit into the {} experts of topk_group {} of {}",
              origin, c.num_experts_per_tok, kept, c.topk_group, c.n_group);
  }
}

}  // namespace

void validate(const ModelConfig& config, const std::string& origin) {
  check_positive({{"vocab_size", config.vocab_size},
                  {"hidden_size", config.hidden_size},
                  {"num_hidden_layers", config.num_hidden_layers},
                  {"intermediate_size", config.intermediate_size},
                  {"max_position_embeddings", config.max_position_embeddings}},
                 origin);
  check_not_negative({{"first_k_dense_replace", config.first_k_dense_replace},
                      {"num_nextn_predict_layers", config.num_nextn_predict_layers}},
                     origin);
  if (config.rms_norm_eps <= 0 || config.initializer_range <= 0) {
    fail_user("{}: rms_norm_eps {} and initializer_range {} must be > 0", origin,
              config.rms_norm_eps, config.initializer_range);
  }
  if (config.tie_word_embeddings) {
    fail_user("{}: tie_word_embeddings: true is not supported, the output head has its own weight",
              origin);
  }
  check_attention(config, origin);
  check_indexer(config, origin);
  check_experts(config, origin);
}

ModelConfig find_flavor(const std::string& model_name, const std::string& flavor) {
  std::vector<std::string> models, names;
  for (const auto& one : flavors()) {
    if (one.model_name == model_name && one.name == flavor) {
      return parse_model_config(one.json, fmt::format("flavor {} {}", model_name, flavor));
    }
    if (one.model_name == model_name) names.push_back(one.name);
    if (models.empty() || models.back() != one.model_name) models.push_back(one.model_name);
  }
  if (names.empty()) {
    fail_user("unknown model '{}'{}; there are {}", model_name, did_you_mean(model_name, models),
              fmt::join(models, ", "));
  }
  fail_user("{} has no flavor '{}'{}; there are {}", model_name, flavor,
            did_you_mean(flavor, names), fmt::join(names, ", "));
}

}  // namespace longhaul::deepseek_v3
