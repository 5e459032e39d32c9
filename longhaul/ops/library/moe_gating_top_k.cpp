// The router's choice.
#include "longhaul/ops/moe_gating_top_k/moe_gating_top_k.h"

#include <ATen/core/grad_mode.h>

#include "longhaul/ops/library/operators.h"

namespace longhaul::ops::library {
namespace {

constexpr int64_t kSoftmax = 0, kSigmoid = 1;  // Ascend's norm_type
constexpr double kEps = 1e-20;                 // of the sum that weights are divided by

namespace cpu {

// renorm: whether the weights of the chosen add up to 1 before they are scaled; a sigmoid's always
// do, as in Ascend's.
GatingOptions gating_options(const char* op, int64_t renorm, int64_t norm_type, double scaling,
                             double eps) {
  LONGHAUL_CHECK(norm_type == kSoftmax || norm_type == kSigmoid,
                 "{}: norm_type: expected 0 (softmax) or 1 (sigmoid), got {}", op, norm_type);
  LONGHAUL_CHECK(renorm == 0 || renorm == 1, "{}: renorm: expected 0 or 1, got {}", op, renorm);
  LONGHAUL_CHECK(eps == kEps, "{}: eps: expected {}, got {}", op, kEps, eps);
  GatingOptions options;
  options.softmax = norm_type == kSoftmax;
  options.normalize = norm_type == kSigmoid || renorm == 1;
  options.scale = scaling;
  return options;
}

ThreeTensors moe_gating_top_k(const Tensor& x, int64_t k, const MaybeTensor& bias,
                              const MaybeTensor& input_ids, const MaybeTensor& tid2eid,
                              int64_t k_group, int64_t group_count, int64_t group_select_mode,
                              int64_t renorm, int64_t norm_type, bool out_flag,
                              double routed_scaling_factor, double eps) {
  const char* op = "moe_gating_top_k";
  const at::NoGradGuard no_grad;
  check_absent(op, "input_ids", input_ids);
  check_absent(op, "tid2eid", tid2eid);
  LONGHAUL_CHECK(group_count == 1 || group_select_mode == 1,
                 "{}: group_select_mode: expected 1 (the two best of a group), got {}", op,
                 group_select_mode);
  GatingOptions options = gating_options(op, renorm, norm_type, routed_scaling_factor, eps);
  options.k = k;
  options.n_group = group_count;
  options.topk_group = k_group;
  const auto gating = ops::moe_gating_top_k(x, or_undefined(bias), options, {}, Kernel::kFused);
  return {gating.weights_TK, gating.experts_TK.to(at::kInt),
          out_flag ? gating.scores_TE : no_result(gating.scores_TE)};
}

std::string why_no_gradient_kernel(const Tensor& scores) {
  if (scores.scalar_type() == at::kBFloat16) return "it takes scores in Float, not in BFloat16";
  return why_no_cpu_kernel(scores);
}

Tensor moe_gating_top_k_backward(const Tensor& x_norm, const Tensor& grad_y,
                                 const Tensor& expert_idx, int64_t renorm, int64_t norm_type,
                                 double routed_scaling_factor, double eps) {
  const GatingOptions options =
      gating_options("moe_gating_top_k_backward", renorm, norm_type, routed_scaling_factor, eps);
  check_shape(grad_y, expert_idx.sizes(), "moe_gating_top_k_backward: grad_y");
  const Tensor experts = to_int64(expert_idx, "moe_gating_top_k_backward: expertIdx");
  if (takes_kernel("moe_gating_top_k_backward", why_no_gradient_kernel(x_norm))) {
    return moe_gating_top_k_grad(x_norm, experts, grad_y, {}, options);
  }
  const auto weights = [&](const std::vector<Tensor>& scores) {
    return gate_weights(scores[0], experts, options);
  };
  const Tensor d_scores =
      reference_gradients(weights, {x_norm}, grad_y.to(x_norm.scalar_type()))[0];
  return options.softmax ? at::_softmax_backward_data(d_scores, x_norm, -1, x_norm.scalar_type())
                         : at::sigmoid_backward(d_scores, x_norm);
}

}  // namespace cpu

namespace meta {

ThreeTensors moe_gating_top_k(const Tensor& x, int64_t k, const MaybeTensor& /*bias*/,
                              const MaybeTensor& /*input_ids*/, const MaybeTensor& /*tid2eid*/,
                              int64_t /*k_group*/, int64_t /*group_count*/,
                              int64_t /*group_select_mode*/, int64_t /*renorm*/,
                              int64_t /*norm_type*/, bool out_flag,
                              double /*routed_scaling_factor*/, double /*eps*/) {
  const SymSizes chosen = {x.sym_size(0), k};
  const auto wide = wide_type(x);
  return {sized(x, chosen, wide), sized(x, chosen, at::kInt),
          sized(x, out_flag ? x.sym_sizes().vec() : SymSizes{0}, wide)};
}

Tensor moe_gating_top_k_backward(const Tensor& x_norm, const Tensor& /*grad_y*/,
                                 const Tensor& /*expert_idx*/, int64_t /*renorm*/,
                                 int64_t /*norm_type*/, double /*routed_scaling_factor*/,
                                 double /*eps*/) {
  return sized_like(x_norm);
}

}  // namespace meta

namespace autograd {

struct Gating : torch::autograd::Function<Gating> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, int64_t k,
                               const MaybeTensor& bias, int64_t k_group, int64_t group_count,
                               int64_t group_select_mode, int64_t renorm, int64_t norm_type,
                               bool out_flag, double scaling, double eps) {
    static const auto op = find_operator<decltype(cpu::moe_gating_top_k)>("moe_gating_top_k");
    const at::AutoDispatchBelowADInplaceOrView guard;
    // The gradient needs the scores.
    const auto [weights, experts, scores] =
        op.call(x, k, bias, std::nullopt, std::nullopt, k_group, group_count, group_select_mode,
                renorm, norm_type, /*out_flag=*/true, scaling, eps);
    ctx->save_for_backward({scores, experts});
    ctx->saved_data["renorm"] = renorm;
    ctx->saved_data["norm_type"] = norm_type;
    ctx->saved_data["scaling"] = scaling;
    ctx->saved_data["eps"] = eps;
    ctx->saved_data["dtype"] = x.scalar_type();
    const Tensor result = out_flag ? scores : at::empty({0}, scores.options());
    ctx->mark_non_differentiable(out_flag ? variable_list{experts}
                                          : variable_list{experts, result});
    ctx->set_materialize_grads(false);
    return {weights, experts, result};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto op =
        find_operator<decltype(cpu::moe_gating_top_k_backward)>("moe_gating_top_k_backward");
    const auto saved = ctx->get_saved_variables();
    const Tensor& scores = saved[0];
    const int64_t norm_type = ctx->saved_data["norm_type"].toInt();
    Tensor d_x;
    if (grads[0].defined()) {
      d_x = op.call(scores, grads[0], saved[1], ctx->saved_data["renorm"].toInt(), norm_type,
                    ctx->saved_data["scaling"].toDouble(), ctx->saved_data["eps"].toDouble());
    }
    if (grads[2].defined()) {
      const Tensor of_scores =
          norm_type == kSoftmax
              ? at::_softmax_backward_data(grads[2], scores, -1, scores.scalar_type())
              : at::sigmoid_backward(grads[2], scores);
      d_x = d_x.defined() ? d_x + of_scores : of_scores;
    }
    variable_list result(11);
    if (d_x.defined()) result[0] = d_x.to(ctx->saved_data["dtype"].toScalarType());
    return result;
  }
};

ThreeTensors moe_gating_top_k(const Tensor& x, int64_t k, const MaybeTensor& bias,
                              const MaybeTensor& input_ids, const MaybeTensor& tid2eid,
                              int64_t k_group, int64_t group_count, int64_t group_select_mode,
                              int64_t renorm, int64_t norm_type, bool out_flag,
                              double routed_scaling_factor, double eps) {
  check_absent("moe_gating_top_k", "input_ids", input_ids);
  check_absent("moe_gating_top_k", "tid2eid", tid2eid);
  const auto out = Gating::apply(x, k, bias, k_group, group_count, group_select_mode, renorm,
                                 norm_type, out_flag, routed_scaling_factor, eps);
  return {out[0], out[1], out[2]};
}

}  // namespace autograd
}  // namespace

TORCH_LIBRARY_FRAGMENT(longhaul, m) {
  m.def(
      "moe_gating_top_k(Tensor x, int k, *, Tensor? bias=None, Tensor? input_ids=None, "
      "Tensor? tid2eid=None, int k_group=1, int group_count=1, int group_select_mode=0, "
      "int renorm=0, int norm_type=0, bool out_flag=False, float routed_scaling_factor=1.0, "
      "float eps=1e-20) -> (Tensor, Tensor, Tensor)",
      kTags);
  m.def(
      "moe_gating_top_k_backward(Tensor x_norm, Tensor grad_y, Tensor expertIdx, *, "
      "int renorm=0, int norm_type=0, float routed_scaling_factor=1.0, float eps=1e-20) -> "
      "Tensor",
      kTags);
}

TORCH_LIBRARY_IMPL(longhaul, CPU, m) {
  m.impl("moe_gating_top_k", cpu::moe_gating_top_k);
  m.impl("moe_gating_top_k_backward", cpu::moe_gating_top_k_backward);
}

TORCH_LIBRARY_IMPL(longhaul, Meta, m) {
  m.impl("moe_gating_top_k", meta::moe_gating_top_k);
  m.impl("moe_gating_top_k_backward", meta::moe_gating_top_k_backward);
}

TORCH_LIBRARY_IMPL(longhaul, Autograd, m) {
  m.impl("moe_gating_top_k", autograd::moe_gating_top_k);
  m.impl("moe_gating_top_k_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace longhaul::ops::library
