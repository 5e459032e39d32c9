#include "longhaul/models/deepseek_v3/flops.h"

#include <algorithm>

namespace longhaul::deepseek_v3 {
namespace {

// Sum over t < S of min(K, t + 1).
double selected_pairs(int64_t S, int64_t K) {
  const double k = static_cast<double>(std::min(S, K)), s = static_cast<double>(S);
  return k * (k + 1) / 2 + (s - k) * k;
}

// Elements of the matrices; the norms between them are vectors and cost no products.
int64_t mla_matrices(const ModelConfig& c) {
  const int64_t D = c.hidden_size, H = c.num_attention_heads, qk = c.qk_head_dim();
  const int64_t query = c.q_lora_rank > 0 ? c.q_lora_rank * (D + H * qk) : D * H * qk;
  const int64_t kv = D * (c.kv_lora_rank + c.qk_rope_head_dim) +
                     c.kv_lora_rank * H * (c.qk_nope_head_dim + c.v_head_dim);
  return query + kv + H * c.v_head_dim * D;
}

int64_t indexer_matrices(const ModelConfig& c) {
  if (!c.has_indexer()) return 0;
  const int64_t D = c.hidden_size, query_in = c.q_lora_rank > 0 ? c.q_lora_rank : D;
  return query_in * c.index_n_heads * c.index_head_dim + D * c.index_head_dim + D * c.index_n_heads;
}

// Of the query and key/value latents, the indexer's keys (weight and bias), and the block's two.
int64_t norm_parameters(const ModelConfig& c) {
  return c.q_lora_rank + c.kv_lora_rank + (c.has_indexer() ? 2 * c.index_head_dim : 0) +
         2 * c.hidden_size;
}

int64_t expert_parameters(const ModelConfig& c) {
  return 3 * c.hidden_size * c.moe_intermediate_size;
}

// A layer's feed-forward part with `experts` routed experts.
int64_t feed_forward_parameters(const ModelConfig& c, int64_t layer, int64_t experts) {
  if (!c.is_moe_layer(layer)) return 3 * c.hidden_size * c.intermediate_size;
  return c.hidden_size * c.n_routed_experts + expert_parameters(c) * (experts + c.n_shared_experts);
}

int64_t all_parameters(const ModelConfig& c, const ModelSettings& settings, int64_t experts) {
  const int64_t D = c.hidden_size;
  // eh_proj, enorm, hnorm and perhaps a final norm.
  const int64_t mtp = 2 * D * D + 2 * D + (settings.mtp_own_norm ? D : 0);
  int64_t sum = 2 * c.vocab_size * D + D;  // embedding, head, final norm
  for (int64_t i = 0; i < c.num_hidden_layers + c.num_nextn_predict_layers; ++i) {
    sum += mla_matrices(c) + indexer_matrices(c) + norm_parameters(c);
    sum += feed_forward_parameters(c, i, experts);
    if (i >= c.num_hidden_layers) sum += mtp;
  }
  return sum;
}

// Forward products of attention over (query, key) pairs.
double attention_flops_per_pair(const ModelConfig& c, const ModelSettings& settings) {
  const bool absorbed = settings.mla_form == MlaForm::kAbsorbed;
  const int64_t score = absorbed ? c.kv_lora_rank + c.qk_rope_head_dim : c.qk_head_dim();
  const int64_t value = absorbed ? c.kv_lora_rank : c.v_head_dim;
  return 2.0 * static_cast<double>(c.num_attention_heads * (score + value));
}

}  // namespace

ParameterCounts count_parameters(const ModelConfig& config, const ModelSettings& settings) {
  return {.total = all_parameters(config, settings, config.n_routed_experts),
          .active = all_parameters(config, settings, config.num_experts_per_tok)};
}

double training_flops_per_sequence(const ModelConfig& c, const ModelSettings& settings,
                                   int64_t seq_len) {
  const double S = static_cast<double>(seq_len);
  const auto stage = stage_of(c, settings);
  const bool learns = indexer_learns(c, settings);
  const double all_pairs = selected_pairs(seq_len, seq_len);
  const bool sparse = stage == IndexerStage::kSparse;
  const double pairs = sparse ? selected_pairs(seq_len, c.index_topk) : all_pairs;
  const double trunk_passes = stage == IndexerStage::kDenseWarmup ? 1 : 3;

  double trunk = 0, indexer = 0;
  for (int64_t i = 0; i < c.num_hidden_layers + c.num_nextn_predict_layers; ++i) {
    const bool mtp = i >= c.num_hidden_layers;
    const int64_t matrices = mla_matrices(c) +
                             feed_forward_parameters(c, i, c.num_experts_per_tok) +
                             (mtp ? 2 * c.hidden_size * c.hidden_size : 0);
    trunk +=
        2.0 * static_cast<double>(matrices) * S + pairs * attention_flops_per_pair(c, settings);
    trunk += mtp ? 2.0 * static_cast<double>(c.vocab_size * c.hidden_size) * S : 0;
    if (stage == IndexerStage::kOff) continue;
    const double per_pair = 2.0 * static_cast<double>(c.index_n_heads * (c.index_head_dim + 1));
    const double projections = 2.0 * static_cast<double>(indexer_matrices(c)) * S;
    // Every visible key is scored once; the backward products run over the keys of the loss.
    indexer +=
        (learns ? 2 : 1) * projections + all_pairs * per_pair + (learns ? 2 * pairs * per_pair : 0);
  }
  trunk += 2.0 * static_cast<double>(c.vocab_size * c.hidden_size) * S;
  return trunk * trunk_passes + indexer;
}

}  // namespace longhaul::deepseek_v3
