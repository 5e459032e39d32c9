// The feed-forward parts: the dense MLP and DeepSeekMoE (DeepSeek-V3 report, section 2.1.2).
// T tokens (B * S), D hidden, E experts, k experts a token, I intermediate size.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "longhaul/models/deepseek_v3/context.h"
#include "longhaul/models/deepseek_v3/model_config.h"
#include "longhaul/models/deepseek_v3/settings.h"
#include "longhaul/nn/layers.h"
#include "longhaul/ops/moe_gating_top_k/moe_gating_top_k.h"
#include "longhaul/ops/moe_token_permute/moe_token_permute.h"

namespace longhaul::deepseek_v3 {

// W_down(silu(W_gate x) * W_up x): a dense layer's MLP, or the shared experts.
class Mlp : public nn::Module {
 public:
  Mlp(int64_t hidden_size, int64_t intermediate_size, const nn::TensorSpec& spec);
  Tensor forward(const Tensor& x) const;

 private:
  nn::Linear gate_proj_, up_proj_, down_proj_;
  ops::Kernel kernel_ = ops::Kernel::kReference;  // of swiglu
};

// In the name of each parameter of the routed experts, and of no other.
inline constexpr const char* kExpertsInName = ".mlp.experts.";

inline bool is_routed_expert(const std::string& parameter_name) {
  return parameter_name.find(kExpertsInName) != std::string::npos;
}

inline bool is_router(const std::string& parameter_name) {
  return parameter_name.find(".mlp.gate.") != std::string::npos;
}

// Who computes the rows of experts that are not held here. Whoever deals the experts out implements
// it (parallel/expert.h).
class ExpertExchange {
 public:
  // Rows sorted by expert [M, D] and the counts of the experts that are held here: [M, D].
  using Compute = std::function<Tensor(const Tensor& rows_MD, const Tensor& counts)>;
  virtual ~ExpertExchange() = default;
  // Of stacked weights [E, out, in] those of the experts that are held here. Differentiable.
  virtual Tensor held(const Tensor& weights) const = 0;
  // What the experts make of rows that are sorted by all experts, counts [E] int64; `compute_held`
  // computes those of the experts that are held here. Rows behind the last expert's give 0.
  // Differentiable.
  virtual Tensor compute(const Tensor& rows_MD, const Tensor& counts_E,
                         const Compute& compute_held) const = 0;
};

// The routed experts of a layer, stacked: weights [E, out, in].
class Experts : public nn::Module {
 public:
  Experts(const ModelConfig& config, const nn::TensorSpec& spec);
  // Rows sorted by expert [M, D], counts [E] int64: [M, D]. Rows behind the last expert's give 0.
  Tensor forward(const Tensor& rows_MD, const Tensor& counts_E) const;
  // Where some of the experts are held elsewhere.
  void set_exchange(std::shared_ptr<const ExpertExchange> exchange) {
    exchange_ = std::move(exchange);
  }

 private:
  Tensor compute_held(const Tensor& rows_MD, const Tensor& counts) const;

  std::shared_ptr<const ExpertExchange> exchange_;
  Tensor gate_proj_, up_proj_, down_proj_;
  ops::Kernel kernel_ = ops::Kernel::kReference;  // of swiglu
};

// Scores, chooses and weighs experts in fp32. Its bias is a buffer: moved by the trainer, not by
// gradients.
class Router : public nn::Module {
 public:
  struct Routing {
    Tensor logits_TE, scores_TE;
    Tensor experts_TK;  // int64; E for tokens that are not valid
    Tensor weights_TK;  // 0 for tokens that are not valid
  };

  Router(int64_t layer, const ModelConfig& config, const ModelSettings& settings);
  // x [T, D], valid [T] bool.
  Routing forward(const Tensor& x_TD, const Tensor& valid_T, const ForwardContext& ctx) const;

  // [E], or undefined where the score function is softmax.
  Tensor& bias() { return e_score_correction_bias_; }

 private:
  Tensor in_turn(int64_t num_tokens) const;
  // The experts where the scores do not decide: a recorded decision, or all in turn; else
  // undefined.
  Tensor choice_before_scores(int64_t num_tokens, const ForwardContext& ctx) const;

  int64_t layer_, num_experts_;
  bool force_load_balance_;
  ops::GatingOptions options_;
  ops::Kernel kernel_ = ops::Kernel::kReference;
  Tensor weight_, e_score_correction_bias_;
};

class Moe : public nn::Module {
 public:
  Moe(int64_t layer, const ModelConfig& config, const ModelSettings& settings);

  // [B, S, D] to [B, S, D]; attaches the balance and z losses.
  Tensor forward(const Tensor& x_BSD, const Sequence& sequence, const ForwardContext& ctx) const;

  Router& router() { return router_; }
  Experts& experts() { return experts_; }
  // Where this layer routes a share of the tokens only (a hook of the module sees to that): adds up
  // over all shares, without gradient, the counts that the balance loss is made of. What is
  // recorded stays that of the share.
  using OverShares = std::function<Tensor(const Tensor& statistic)>;
  void set_over_shares(OverShares over_shares) { over_shares_ = std::move(over_shares); }

 private:
  // The tokens of a layer that are routed here.
  struct Tokens {
    Tensor x_BSD, valid_BS;
    const Sequence& sequence;
  };

  Tensor route(const Tokens& tokens, const ForwardContext& ctx) const;
  Tensor balance_loss(const Router::Routing& routing, const Tokens& tokens) const;
  Tensor z_loss(const Router::Routing& routing, const Tokens& tokens) const;
  Tensor attach_losses(const Tensor& out, const Router::Routing& routing, const Tokens& tokens,
                       const ForwardContext& ctx) const;
  void record(std::map<int64_t, Tensor> StepStats::*statistic, const Tensor& of_share,
              const ForwardContext& ctx) const;

  int64_t layer_, num_experts_, experts_per_token_;
  double balance_coeff_, z_coeff_;
  ops::Kernel permute_kernel_ = ops::Kernel::kReference;
  Router router_;
  Experts experts_;
  std::optional<Mlp> shared_experts_;
  OverShares over_shares_;
};

}  // namespace longhaul::deepseek_v3
