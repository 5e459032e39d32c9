// Multi-head latent attention (DeepSeek-V2 report, section 2.1) with DeepSeek Sparse Attention on
// top. B batch, S sequence, D hidden, H heads, N/R query-key dims without and with rope, V value
// dims, C kv_lora_rank, Q q_lora_rank, K index_topk.
#pragma once

#include <memory>
#include <optional>

#include "longhaul/models/deepseek_v3/context.h"
#include "longhaul/models/deepseek_v3/indexer.h"
#include "longhaul/models/deepseek_v3/model_config.h"
#include "longhaul/models/deepseek_v3/settings.h"
#include "longhaul/nn/layers.h"
#include "longhaul/ops/flash_attention/flash_attention.h"

namespace longhaul::deepseek_v3 {

class Attention : public nn::Module {
 public:
  Attention(int64_t layer, const ModelConfig& config, const ModelSettings& settings);

  // [B, S, D] to [B, S, D]; attaches the indexer's loss.
  Tensor forward(const Tensor& x_BSD, const Sequence& sequence, const ForwardContext& ctx) const;

 private:
  struct Queries {
    Tensor nope_BSHN, rope_BSHR, latent_BSQ;
  };
  // Of the attention operators: key rows are shared (absorbed; the values are their first C
  // columns) or one for a head.
  struct Operands {
    Tensor query, key, value;
  };

  Queries project_queries(const Tensor& x_BSD, const RopeTable& rope) const;
  Operands absorbed(const Queries& q, const Tensor& latent_BSC, const Tensor& k_rope_BSR,
                    const Tensor& kv_b_HWC) const;
  Operands expanded(const Queries& q, const Tensor& latent_BSC, const Tensor& k_rope_BSR) const;
  Tensor rotate(const Tensor& x, const RopeTable& rope) const;
  // The latents and rope keys of the whole sequence from those of a slice, in place.
  void gather_keys(const SequenceCut& cut, Tensor& latent_BSC, Tensor& k_rope_BSR) const;
  // kv_b_proj by head, [H, W, C] with W = N + V.
  Tensor kv_b_by_head(at::ScalarType dtype) const;
  Tensor values_from_latents(const Tensor& latents_BSHC, const Tensor& kv_b_HWC) const;

  ops::AttentionResult attend(const Operands& operands, const Tensor& indices,
                              const Sequence& sequence, bool for_indexer) const;
  // Summed over the queries, over all visible keys.
  Tensor dense_indexer_loss(const ops::IndexerInputs& inputs, const Operands& operands,
                            const ops::AttentionResult& attention, const Sequence& sequence) const;
  // What this pass attended to, and what came of it.
  struct Attended {
    Tensor indices;  // undefined: all visible keys
    const ops::AttentionResult& result;
  };
  // Records the indexer's recall of the keys that were attended to, or in the dense warm-up of
  // those that it would select. Without a gradient: a sparse pass, and a dense one unless that was
  // this.
  void record_recall(const ops::IndexerInputs& inputs, const Operands& operands,
                     const Attended& attended, const Sequence& sequence,
                     const ForwardContext& ctx) const;
  Tensor attach_indexer_loss(const Tensor& out, const Tensor& sum, const Sequence& sequence,
                             const ForwardContext& ctx) const;

  int64_t layer_, heads_, nope_, rope_, value_, latent_;
  double scale_, indexer_loss_coeff_;
  MlaForm form_;
  IndexerStage stage_;
  bool train_indexer_;
  ops::Kernel dsa_kernel_ = ops::Kernel::kReference, rope_kernel_ = ops::Kernel::kReference;

  std::optional<nn::Linear> q_proj_;  // without q_lora
  std::optional<nn::Linear> q_a_proj_, q_b_proj_;
  std::optional<nn::RMSNorm> q_a_layernorm_;
  nn::Linear kv_a_proj_with_mqa_;
  nn::RMSNorm kv_a_layernorm_;
  nn::Linear kv_b_proj_, o_proj_;
  std::optional<Indexer> indexer_;
};

}  // namespace longhaul::deepseek_v3
