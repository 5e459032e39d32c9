#include "longhaul/ops/moe_gating_top_k/moe_gating_top_k.h"

#include <torch/csrc/autograd/custom_function.h>

#include "longhaul/ops/cpu/tensors.h"
#include "longhaul/ops/moe_gating_top_k/check.h"

namespace longhaul::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

longhaul_moe_gating_top_k_args args_of(const GatingOptions& o, const Tensor& scores_TE,
                                       const Tensor& experts_TK) {
  longhaul_moe_gating_top_k_args args = {};
  args.T = scores_TE.size(0);
  args.E = scores_TE.size(1);
  args.k = experts_TK.size(1);
  args.n_group = o.n_group;
  args.topk_group = o.topk_group;
  args.softmax = o.softmax;
  args.normalize = o.normalize;
  args.scale = static_cast<float>(o.scale);
  args.scores = scores_TE.data_ptr<float>();
  args.experts = experts_TK.data_ptr<int64_t>();
  return args;
}

// What is not differentiated; the tensors may be undefined.
struct Choice {
  const GatingOptions& options;
  const Tensor &bias_E, &chosen_TK;
};

Gating run(const Tensor& logits_TE, const Choice& choice) {
  const auto& [options, bias_E, chosen_TK] = choice;
  const int64_t T = logits_TE.size(0);
  const Tensor scores = at::empty(logits_TE.sizes(), logits_TE.options());
  const Tensor experts = chosen_TK.defined()
                             ? chosen_TK.contiguous()
                             : at::empty({T, options.k}, logits_TE.options().dtype(at::kLong));
  const Tensor weights = at::empty(experts.sizes(), logits_TE.options());
  if (logits_TE.is_meta()) return {scores, experts, weights};
  const Tensor logits = logits_TE.contiguous();
  const Tensor bias = bias_E.defined() ? bias_E.to(at::kFloat).contiguous() : Tensor();
  auto args = args_of(options, scores, experts);
  args.chosen = chosen_TK.defined();
  args.logits = logits.const_data_ptr<float>();
  args.bias = bias.defined() ? bias.const_data_ptr<float>() : nullptr;
  args.weights = weights.data_ptr<float>();
  run_kernel("moe_gating_top_k", longhaul_moe_gating_top_k, longhaul_moe_gating_top_k_workspace,
             args);
  return {scores, experts, weights};
}

struct GatingFunction : torch::autograd::Function<GatingFunction> {
  static variable_list forward(AutogradContext* ctx, const Tensor& logits_TE,
                               const Choice& choice) {
    const auto [scores, experts, weights] = run(logits_TE, choice);
    const GatingOptions& options = choice.options;
    ctx->save_for_backward({scores, experts});
    ctx->mark_non_differentiable({experts});
    ctx->set_materialize_grads(false);
    ctx->saved_data["softmax"] = options.softmax;
    ctx->saved_data["normalize"] = options.normalize;
    ctx->saved_data["scale"] = options.scale;
    return {scores, experts, weights};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    GatingOptions options;
    options.softmax = ctx->saved_data["softmax"].toBool();
    options.normalize = ctx->saved_data["normalize"].toBool();
    options.scale = ctx->saved_data["scale"].toDouble();
    const Tensor d_weights =
        grads[2].defined() ? grads[2] : at::zeros(saved[1].sizes(), saved[0].options());
    return {moe_gating_top_k_grad(saved[0], saved[1], d_weights, grads[0], options), Tensor()};
  }
};

Gating by_definition(const Tensor& logits_TE, const Tensor& bias_E, const GatingOptions& options,
                     const Tensor& chosen_TK) {
  const Tensor scores = gating_scores(logits_TE, options);
  const Tensor experts = chosen_TK.defined() ? chosen_TK : choose_experts(scores, bias_E, options);
  return {scores, experts, gate_weights(scores, experts, options)};
}

}  // namespace

Tensor moe_gating_top_k_grad(const Tensor& scores_in, const Tensor& experts_in,
                             const Tensor& d_weights_TK, const Tensor& d_scores_TE,
                             const GatingOptions& options) {
  check_dims(scores_in, 2, "router scores");
  check_shape(experts_in, {scores_in.size(0), kAnySize}, "chosen experts");
  check_shape(d_weights_TK, experts_in.sizes(), "gradient of the weights");
  const Tensor scores = scores_in.contiguous(), experts = experts_in.contiguous();
  Tensor d_logits = at::empty_like(scores);
  if (scores.is_meta()) return d_logits;
  const Tensor d_weights = d_weights_TK.to(at::kFloat).contiguous();
  const Tensor d_scores = d_scores_TE.defined() ? d_scores_TE.contiguous() : Tensor();
  run_kernel("moe_gating_top_k_grad", longhaul_moe_gating_top_k_grad,
             longhaul_moe_gating_top_k_grad_args{
                 .forward = args_of(options, scores, experts),
                 .d_weights = d_weights.const_data_ptr<float>(),
                 .d_scores = d_scores.defined() ? d_scores.const_data_ptr<float>() : nullptr,
                 .d_logits = d_logits.data_ptr<float>()});
  return d_logits;
}

Gating moe_gating_top_k(const Tensor& logits_TE, const Tensor& bias_E, const GatingOptions& options,
                        const Tensor& chosen_TK, Kernel kernel) {
  check_gating(logits_TE, bias_E, options);
  if (chosen_TK.defined()) {
    check_shape(chosen_TK, {logits_TE.size(0), options.k}, "chosen experts");
  }
  if (kernel == Kernel::kFused) {
    const std::string reason = why_no_cpu_kernel(logits_TE);
    if (reason.empty()) {
      // Scores are fp32 in any case.
      const auto results =
          GatingFunction::apply(logits_TE.to(at::kFloat), Choice{options, bias_E, chosen_TK});
      return {results[0], results[1], results[2]};
    }
    report_fallback("moe_gating_top_k", reason);
  }
  return by_definition(logits_TE, bias_E, options, chosen_TK);
}

}  // namespace longhaul::ops
