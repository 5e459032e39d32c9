#include "longhaul/models/deepseek_v3/attention.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "longhaul/nn/auxiliary_loss.h"
#include "longhaul/nn/profile_range.h"
#include "longhaul/ops/common.h"
#include "longhaul/ops/lightning_indexer/lightning_indexer.h"
#include "longhaul/ops/matmul/matmul.h"
#include "longhaul/ops/rotary_mul/rotary_mul.h"
#include "longhaul/ops/sparse_flash_attention/sparse_flash_attention.h"

namespace longhaul::deepseek_v3 {
namespace {

// The latent norms keep their own epsilon, whatever rms_norm_eps says.
constexpr double kLatentNormEps = 1e-6;

}  // namespace

Attention::Attention(int64_t layer, const ModelConfig& config, const ModelSettings& settings)
    : layer_(layer),
      heads_(config.num_attention_heads),
      nope_(config.qk_nope_head_dim),
      rope_(config.qk_rope_head_dim),
      value_(config.v_head_dim),
      latent_(config.kv_lora_rank),
      scale_(softmax_scale(config)),
      indexer_loss_coeff_(settings.indexer_loss_coeff),
      form_(settings.mla_form),
      stage_(stage_of(config, settings)),
      train_indexer_(indexer_learns(config, settings)),
      kv_a_proj_with_mqa_(config.hidden_size, latent_ + rope_, parameter_spec(settings)),
      kv_a_layernorm_(latent_, kLatentNormEps, parameter_spec(settings)),
      kv_b_proj_(latent_, heads_ * (nope_ + value_), parameter_spec(settings)),
      o_proj_(heads_ * value_, config.hidden_size, parameter_spec(settings)) {
  const auto spec = parameter_spec(settings);
  const int64_t query_width = heads_ * (nope_ + rope_);
  if (config.q_lora_rank > 0) {
    add_child("q_a_proj", q_a_proj_.emplace(config.hidden_size, config.q_lora_rank, spec));
    add_child("q_a_layernorm", q_a_layernorm_.emplace(config.q_lora_rank, kLatentNormEps, spec));
    add_child("q_b_proj", q_b_proj_.emplace(config.q_lora_rank, query_width, spec));
  } else {
    add_child("q_proj", q_proj_.emplace(config.hidden_size, query_width, spec));
  }
  add_child("kv_a_proj_with_mqa", kv_a_proj_with_mqa_);
  add_child("kv_a_layernorm", kv_a_layernorm_);
  add_child("kv_b_proj", kv_b_proj_);
  add_child("o_proj", o_proj_);
  add_kernel("rope", rope_kernel_);
  add_kernel("dsa", dsa_kernel_);
  if (config.has_indexer()) add_child("indexer", indexer_.emplace(config, settings, spec));
}

Tensor Attention::forward(const Tensor& x_BSD, const Sequence& sequence,
                          const ForwardContext& ctx) const {
  const nn::ProfileRange range("model.layers.{}.self_attn", layer_);
  const Queries q = project_queries(x_BSD, sequence.rope);
  const auto kv = kv_a_proj_with_mqa_.forward(x_BSD).split_with_sizes({latent_, rope_}, -1);
  Tensor latent_BSC = kv_a_layernorm_.forward(kv[0]);
  Tensor k_rope_BSR = rotate(kv[1], sequence.rope);
  if (sequence.cut != nullptr) gather_keys(*sequence.cut, latent_BSC, k_rope_BSR);
  const bool is_absorbed = form_ == MlaForm::kAbsorbed;
  // Cast once for both of its parts.
  const Tensor kv_b_HWC = is_absorbed ? kv_b_by_head(latent_BSC.scalar_type()) : Tensor();
  const Operands operands = is_absorbed ? absorbed(q, latent_BSC, k_rope_BSR, kv_b_HWC)
                                        : expanded(q, latent_BSC, k_rope_BSR);
  if (ctx.probe) {
    ctx.probe("attn_query", layer_, operands.query);
    ctx.probe("attn_key", layer_, operands.key);
  }
  const bool learn = train_indexer_ && ctx.training();
  ops::IndexerInputs indexer_inputs;
  ops::IndexerSelection selection;
  if (learn || stage_ == IndexerStage::kSparse) {
    const nn::ProfileRange indexer_range("model.layers.{}.self_attn.indexer", layer_);
    indexer_inputs = indexer_->forward(x_BSD, q.latent_BSQ, sequence.rope);
    if (sequence.cut != nullptr) {
      indexer_inputs.key_BSD = sequence.cut->gather(indexer_inputs.key_BSD);
    }
    if (ctx.probe) {
      ctx.probe("indexer_query", layer_, indexer_inputs.query_BSHD);
      ctx.probe("indexer_key", layer_, indexer_inputs.key_BSD);
      ctx.probe("indexer_weights", layer_, indexer_inputs.weights_BSH);
    }
  }
  if (stage_ == IndexerStage::kSparse) {
    const nn::ProfileRange select_range("model.layers.{}.self_attn.indexer.select", layer_);
    const auto select = [&] {
      selection = indexer_->select(indexer_inputs, sequence.visible_keys(), dsa_kernel_);
      return selection.indices_BSK;
    };
    auto* decisions = ctx.decisions;
    selection.indices_BSK =
        decide_once(decisions ? &decisions->topk_indices : nullptr, layer_, select);
    if (decisions) {
      if (selection.scores_BSK.defined()) decisions->topk_scores[layer_] = selection.scores_BSK;
      selection.scores_BSK = decisions->topk_scores[layer_];
    }
    if (ctx.probe) ctx.probe("topk_indices", layer_, selection.indices_BSK);
  }

  const auto result = attend(operands, selection.indices_BSK, sequence, learn);
  const Tensor values_BSHV =
      is_absorbed ? values_from_latents(result.out_BSHV, kv_b_HWC) : result.out_BSHV;
  const Tensor out =
      o_proj_.forward(values_BSHV.reshape({x_BSD.size(0), x_BSD.size(1), heads_ * value_}));
  if (ctx.probe) ctx.probe("attn_out", layer_, out);
  if (ctx.measure_recall && ctx.recording() && indexer_inputs.query_BSHD.defined()) {
    record_recall(indexer_inputs, operands, {selection.indices_BSK, result}, sequence, ctx);
  }
  if (!learn) return out;
  const Tensor loss =
      stage_ == IndexerStage::kSparse
          ? ops::sparse_indexer_kl_loss(indexer_inputs, selection.indices_BSK, result.head_sum,
                                        dsa_kernel_, selection.scores_BSK)
          : dense_indexer_loss(indexer_inputs, operands, result, sequence);
  return attach_indexer_loss(out, loss, sequence, ctx);
}

Attention::Queries Attention::project_queries(const Tensor& x_BSD, const RopeTable& rope) const {
  Tensor latent = x_BSD, q;
  if (q_proj_) {
    q = q_proj_->forward(x_BSD);
  } else {
    latent = q_a_layernorm_->forward(q_a_proj_->forward(x_BSD));
    q = q_b_proj_->forward(latent);
  }
  const auto parts = q.view({x_BSD.size(0), x_BSD.size(1), heads_, nope_ + rope_})
                         .split_with_sizes({nope_, rope_}, -1);
  return {parts[0], rotate(parts[1], rope), latent};
}

Tensor Attention::rotate(const Tensor& x, const RopeTable& rope) const {
  return ops::rotary_mul(x, rope.cos, rope.sin, ops::RotaryMode::kInterleaved, rope_kernel_);
}

// Before the keys are expanded: of all that attention needs of the other slices these are the
// narrowest rows.
void Attention::gather_keys(const SequenceCut& cut, Tensor& latent_BSC, Tensor& k_rope_BSR) const {
  const auto whole =
      cut.gather(at::cat({latent_BSC, k_rope_BSR}, -1)).split_with_sizes({latent_, rope_}, -1);
  latent_BSC = whole[0];
  k_rope_BSR = whole[1];
}

Tensor Attention::kv_b_by_head(at::ScalarType dtype) const {
  return kv_b_proj_.weight.to(dtype).view({heads_, nope_ + value_, latent_});
}

// score = (W_uk^T q_nope) . latent + q_rope . k_rope: W_uk moves from the keys to the queries.
Attention::Operands Attention::absorbed(const Queries& q, const Tensor& latent_BSC,
                                        const Tensor& k_rope_BSR, const Tensor& kv_b_HWC) const {
  const Tensor w_uk_HNC = kv_b_HWC.narrow(1, 0, nope_);
  return {at::cat({ops::linear_by_head(q.nope_BSHN, w_uk_HNC), q.rope_BSHR}, -1),
          at::cat({latent_BSC, k_rope_BSR}, -1), Tensor()};
}

Attention::Operands Attention::expanded(const Queries& q, const Tensor& latent_BSC,
                                        const Tensor& k_rope_BSR) const {
  const int64_t B = latent_BSC.size(0), S = latent_BSC.size(1);
  const auto kv = kv_b_proj_.forward(latent_BSC)
                      .view({B, S, heads_, nope_ + value_})
                      .split_with_sizes({nope_, value_}, -1);
  const Tensor k_rope = k_rope_BSR.unsqueeze(2).expand({B, S, heads_, rope_});
  return {at::cat({q.nope_BSHN, q.rope_BSHR}, -1), at::cat({kv[0], k_rope}, -1), kv[1]};
}

Tensor Attention::values_from_latents(const Tensor& latents_BSHC, const Tensor& kv_b_HWC) const {
  const Tensor w_uv_HVC = kv_b_HWC.narrow(1, nope_, value_);
  return ops::linear_by_head(latents_BSHC, w_uv_HVC.transpose(1, 2));
}

ops::AttentionResult Attention::attend(const Operands& operands, const Tensor& indices,
                                       const Sequence& sequence, bool for_indexer) const {
  const bool sparse = indices.defined();
  const ops::AttentionOptions options{.scale = scale_,
                                      .value_dim = latent_,
                                      .return_head_sum = for_indexer && sparse,
                                      .return_statistics = for_indexer && !sparse,
                                      .kernel = dsa_kernel_};
  if (sparse) {
    return ops::sparse_flash_attention(operands.query, operands.key, operands.value, indices,
                                       options);
  }
  return ops::flash_attention(operands.query, operands.key, operands.value, sequence.visible_keys(),
                              options);
}

Tensor Attention::dense_indexer_loss(const ops::IndexerInputs& inputs, const Operands& operands,
                                     const ops::AttentionResult& attention,
                                     const Sequence& sequence) const {
  return ops::dense_indexer_kl_loss(inputs,
                                    {.query_BSHD = operands.query,
                                     .key = operands.key,
                                     .softmax_max = attention.softmax_max,
                                     .softmax_sum = attention.softmax_sum,
                                     .scale = scale_},
                                    sequence.visible_keys(), {.kernel = dsa_kernel_});
}

// Of one query and head the mass on the selected keys is Z_selected / Z_all, the quotient of the
// two softmaxes' denominators. A query that sees no key has 0 of both, one that sees some at
// least 1.
void Attention::record_recall(const ops::IndexerInputs& inputs, const Operands& operands,
                              const Attended& attended, const Sequence& sequence,
                              const ForwardContext& ctx) const {
  const at::NoGradGuard no_grad;
  // A recomputed pass does not come here, so nothing is kept for it.
  const ops::SavedResults::Scope nothing(nullptr, ops::SavedResults::Phase::kForward);
  const auto visible = sequence.visible_keys();
  const bool was_sparse = attended.indices.defined();
  const Tensor indices =
      was_sparse ? attended.indices : indexer_->select(inputs, visible, dsa_kernel_).indices_BSK;
  const ops::AttentionOptions options{
      .scale = scale_, .value_dim = latent_, .return_statistics = true, .kernel = dsa_kernel_};
  // The warm-up's own pass has the dense statistics.
  const auto all = was_sparse ? ops::flash_attention(operands.query, operands.key, operands.value,
                                                     visible, options)
                              : attended.result;
  const auto selected =
      ops::sparse_flash_attention(operands.query, operands.key, operands.value, indices, options);
  const Tensor mass_BSH = selected.softmax_sum * (selected.softmax_max - all.softmax_max).exp() /
                          all.softmax_sum.clamp_min(1);
  const auto terms = static_cast<double>(std::max<int64_t>(sequence.global_tokens, 1) * heads_);
  accumulate(ctx.stats->indexer_recall, layer_, mass_BSH.sum() / terms);
}

Tensor Attention::attach_indexer_loss(const Tensor& out, const Tensor& sum,
                                      const Sequence& sequence, const ForwardContext& ctx) const {
  const Tensor loss = sum / static_cast<double>(std::max<int64_t>(sequence.global_tokens, 1));
  if (ctx.recording()) accumulate(ctx.stats->indexer_loss, layer_, loss);
  return nn::attach_loss(out, loss * indexer_loss_coeff_);
}

}  // namespace longhaul::deepseek_v3
