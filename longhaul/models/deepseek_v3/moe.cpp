#include "longhaul/models/deepseek_v3/moe.h"

#include <ATen/ATen.h>

#include <utility>

#include "longhaul/nn/auxiliary_loss.h"
#include "longhaul/nn/profile_range.h"
#include "longhaul/ops/common.h"
#include "longhaul/ops/grouped_matmul/grouped_matmul.h"
#include "longhaul/ops/matmul/matmul.h"
#include "longhaul/ops/swiglu/swiglu.h"

namespace longhaul::deepseek_v3 {
namespace {

// The router's bias stays fp32 (fp64 in fp64) whatever the weights are.
nn::TensorSpec bias_spec(const ModelSettings& settings) {
  return {settings.param_dtype == at::kDouble ? at::kDouble : at::kFloat, settings.device};
}

// Named in a profiler's trace.
template <typename Compute>
auto in_range(int64_t layer, const char* part, const Compute& compute) {
  const nn::ProfileRange range("model.layers.{}.mlp.{}", layer, part);
  return compute();
}

}  // namespace

Mlp::Mlp(int64_t hidden_size, int64_t intermediate_size, const nn::TensorSpec& spec)
    : gate_proj_(hidden_size, intermediate_size, spec),
      up_proj_(hidden_size, intermediate_size, spec),
      down_proj_(intermediate_size, hidden_size, spec) {
  add_child("gate_proj", gate_proj_);
  add_child("up_proj", up_proj_);
  add_child("down_proj", down_proj_);
  add_kernel("gmm", kernel_);
}

Tensor Mlp::forward(const Tensor& x) const {
  return hooked({x}, [this](const std::vector<Tensor>& in) {
    const Tensor gate = gate_proj_.forward(in[0]), up = up_proj_.forward(in[0]);
    return down_proj_.forward(ops::swiglu(gate, up, kernel_));
  });
}

Experts::Experts(const ModelConfig& config, const nn::TensorSpec& spec) {
  const int64_t E = config.n_routed_experts, D = config.hidden_size,
                I = config.moe_intermediate_size;
  add_parameter("gate_proj.weight", gate_proj_, {E, I, D}, nn::Init::kNormal, spec);
  add_parameter("up_proj.weight", up_proj_, {E, I, D}, nn::Init::kNormal, spec);
  add_parameter("down_proj.weight", down_proj_, {E, D, I}, nn::Init::kNormal, spec);
  add_kernel("gmm", kernel_);
}

Tensor Experts::forward(const Tensor& rows_MD, const Tensor& counts_E) const {
  if (exchange_ == nullptr) return compute_held(rows_MD, counts_E);
  return exchange_->compute(rows_MD, counts_E, [this](const auto& rows, const auto& counts) {
    return compute_held(rows, counts);
  });
}

Tensor Experts::compute_held(const Tensor& rows_MD, const Tensor& counts) const {
  const auto multiply = [&](const Tensor& x, const Tensor& weights) {
    const Tensor held = exchange_ == nullptr ? weights : exchange_->held(weights);
    return ops::grouped_matmul(x, held.to(rows_MD.scalar_type()), counts, kernel_);
  };
  const Tensor gate = multiply(rows_MD, gate_proj_), up = multiply(rows_MD, up_proj_);
  return multiply(ops::swiglu(gate, up, kernel_), down_proj_);
}

Router::Router(int64_t layer, const ModelConfig& config, const ModelSettings& settings)
    : layer_(layer),
      num_experts_(config.n_routed_experts),
      force_load_balance_(settings.force_load_balance),
      options_{.k = config.num_experts_per_tok,
               .n_group = config.n_group,
               .topk_group = config.topk_group,
               .softmax = config.scoring_func == ScoreFunction::kSoftmax,
               .normalize = config.norm_topk_prob,
               .scale = config.routed_scaling_factor} {
  add_parameter("weight", weight_, {num_experts_, config.hidden_size}, nn::Init::kNormal,
                nn::exact(parameter_spec(settings)));
  add_kernel("permute", kernel_);
  if (!options_.softmax) {
    add_buffer("e_score_correction_bias", e_score_correction_bias_, {num_experts_},
               bias_spec(settings));
  }
}

Tensor Router::in_turn(int64_t num_tokens) const {
  const auto options = weight_.options().dtype(at::kLong).requires_grad(false);
  return at::arange(num_tokens * options_.k, options)
      .remainder_(num_experts_)
      .view({num_tokens, options_.k});
}

Tensor Router::choice_before_scores(int64_t num_tokens, const ForwardContext& ctx) const {
  if (ctx.decisions) {
    const auto recorded = ctx.decisions->experts.find(layer_);
    if (recorded != ctx.decisions->experts.end()) return recorded->second;
  }
  return force_load_balance_ ? in_turn(num_tokens) : Tensor();
}

Router::Routing Router::forward(const Tensor& x_TD, const Tensor& valid_T,
                                const ForwardContext& ctx) const {
  const auto wide = ops::wide_type(x_TD);
  Routing routing;
  routing.logits_TE = ops::linear(x_TD.to(wide), weight_.to(wide));
  const auto gating = ops::moe_gating_top_k(routing.logits_TE, e_score_correction_bias_, options_,
                                            choice_before_scores(x_TD.size(0), ctx), kernel_);
  decide_once(ctx.decisions ? &ctx.decisions->experts : nullptr, layer_,
              [&] { return gating.experts_TK; });
  const Tensor invalid = valid_T.logical_not().unsqueeze(1);
  routing.scores_TE = gating.scores_TE;
  routing.weights_TK = gating.weights_TK.masked_fill(invalid, 0);
  routing.experts_TK = gating.experts_TK.masked_fill(invalid, num_experts_);
  if (ctx.probe) {
    ctx.probe("router_logits", layer_, routing.logits_TE);
    ctx.probe("router_experts", layer_, routing.experts_TK);
    ctx.probe("router_weights", layer_, routing.weights_TK);
  }
  return routing;
}

Moe::Moe(int64_t layer, const ModelConfig& config, const ModelSettings& settings)
    : layer_(layer),
      num_experts_(config.n_routed_experts),
      experts_per_token_(config.num_experts_per_tok),
      balance_coeff_(settings.sequence_balance_loss_coeff),
      z_coeff_(settings.z_loss_coeff),
      router_(layer, config, settings),
      experts_(config, parameter_spec(settings)) {
  add_kernel("permute", permute_kernel_);
  add_child("gate", router_);
  add_child("experts", experts_);
  if (config.n_shared_experts > 0) {
    add_child("shared_experts",
              shared_experts_.emplace(config.hidden_size,
                                      config.moe_intermediate_size * config.n_shared_experts,
                                      parameter_spec(settings)));
  }
}

Tensor Moe::forward(const Tensor& x_BSD, const Sequence& sequence,
                    const ForwardContext& ctx) const {
  const Tensor routed = hooked({x_BSD, sequence.slots->valid}, [&](const std::vector<Tensor>& in) {
    return route({.x_BSD = in[0], .valid_BS = in[1], .sequence = sequence}, ctx);
  });
  if (!shared_experts_) return routed;
  return routed +
         in_range(layer_, "shared_experts", [&] { return shared_experts_->forward(x_BSD); });
}

Tensor Moe::route(const Tokens& tokens, const ForwardContext& ctx) const {
  const Tensor x_TD = tokens.x_BSD.reshape({-1, tokens.x_BSD.size(-1)});
  const auto routing = in_range(
      layer_, "gate", [&] { return router_.forward(x_TD, tokens.valid_BS.reshape(-1), ctx); });
  ops::TokenOrder order;
  Tensor sorted_MD = in_range(layer_, "dispatch", [&] {
    order = ops::sort_by_expert(routing.experts_TK, num_experts_);
    return ops::moe_token_permute(x_TD, order, permute_kernel_);
  });
  // What the backward pass does not need goes with the call.
  const Tensor rows_MD = in_range(layer_, "experts", [&] {
    return experts_.forward(std::exchange(sorted_MD, {}), order.counts_E);
  });
  const Tensor out = in_range(layer_, "combine", [&] {
    return ops::moe_token_unpermute(rows_MD, routing.weights_TK, order, permute_kernel_)
        .view(tokens.x_BSD.sizes());
  });
  record(&StepStats::expert_counts, order.counts_E, ctx);
  return ctx.training() ? attach_losses(out, routing, tokens, ctx) : out;
}

void Moe::record(std::map<int64_t, Tensor> StepStats::*statistic, const Tensor& of_share,
                 const ForwardContext& ctx) const {
  if (ctx.recording()) accumulate(ctx.stats->*statistic, layer_, of_share);
}

Tensor Moe::attach_losses(const Tensor& out, const Router::Routing& routing, const Tokens& tokens,
                          const ForwardContext& ctx) const {
  Tensor result = out;
  if (balance_coeff_ != 0) {
    const Tensor loss = balance_loss(routing, tokens);
    record(&StepStats::balance_loss, loss, ctx);
    result = nn::attach_loss(result, loss);
  }
  if (z_coeff_ != 0) {
    const Tensor loss = z_loss(routing, tokens);
    record(&StepStats::z_loss, loss, ctx);
    result = nn::attach_loss(result, loss);
  }
  return result;
}

// Sequence-wise balance loss (DeepSeek-V3 report, equations 17 to 20), each row of the batch
// weighted by its share of the global tokens: coeff / T * sum over rows and experts of f_i * sum_t
// s'_{t,i}. The sum over t is that of the slots here: their share of the loss.
Tensor Moe::balance_loss(const Router::Routing& routing, const Tokens& tokens) const {
  const Tensor& valid_BS = tokens.valid_BS;
  const int64_t B = valid_BS.size(0), E = num_experts_;
  const Tensor chosen = routing.experts_TK.view({B, -1});
  Tensor tokens_B1 = valid_BS.sum(1, true);
  Tensor counts_BE = at::zeros({B, E + 1}, chosen.options())
                         .scatter_add_(1, chosen, at::ones_like(chosen))
                         .narrow(1, 0, E);
  const SequenceCut* cut = tokens.sequence.cut;
  if (cut != nullptr || over_shares_) {
    Tensor of_whole_BE1 = at::cat({counts_BE, tokens_B1}, 1);
    if (over_shares_) of_whole_BE1 = over_shares_(of_whole_BE1);
    if (cut != nullptr) of_whole_BE1 = cut->sum(of_whole_BE1);
    counts_BE = of_whole_BE1.narrow(1, 0, E);
    tokens_B1 = of_whole_BE1.narrow(1, E, 1);
  }
  const auto wide = routing.scores_TE.scalar_type();
  const Tensor row_tokens_B1 = tokens_B1.clamp_min(1).to(wide);
  const Tensor f_BE = counts_BE.to(wide) *
                      (static_cast<double>(E) / static_cast<double>(experts_per_token_)) /
                      row_tokens_B1;
  const Tensor share_TE = routing.scores_TE / (routing.scores_TE.sum(-1, true) + 1e-20);
  const Tensor summed_BE = (share_TE * valid_BS.reshape({-1, 1})).view({B, -1, E}).sum(1);
  const double weight =
      balance_coeff_ / static_cast<double>(std::max<int64_t>(tokens.sequence.global_tokens, 1));
  return (f_BE * summed_BE).sum() * weight;
}

// Router z-loss (Zoph et al., 2022): mean of logsumexp(logits)^2 over the global tokens.
Tensor Moe::z_loss(const Router::Routing& routing, const Tokens& tokens) const {
  const Tensor squares = at::logsumexp(routing.logits_TE, {-1}).square();
  const double weight =
      z_coeff_ / static_cast<double>(std::max<int64_t>(tokens.sequence.global_tokens, 1));
  return (squares * tokens.valid_BS.reshape(-1)).sum() * weight;
}

}  // namespace longhaul::deepseek_v3
