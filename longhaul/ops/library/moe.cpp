// The router's choice and the permutation of tokens.
#include "longhaul/ops/library/operators.h"
#include "longhaul/ops/moe_gating_top_k/moe_gating_top_k.h"
#include "longhaul/ops/moe_token_permute/moe_token_permute.h"

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
                 "{}: norm_type is {}, must be 0 (softmax) or 1 (sigmoid)", op, norm_type);
  LONGHAUL_CHECK(renorm == 0 || renorm == 1, "{}: renorm is {}, must be 0 or 1", op, renorm);
  LONGHAUL_CHECK(eps == kEps, "{}: eps is {}, only {} is there", op, eps, kEps);
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
                 "{}: group_select_mode is {}, only 1 (the two best of a group) is there", op,
                 group_select_mode);
  GatingOptions options = gating_options(op, renorm, norm_type, routed_scaling_factor, eps);
  options.k = k;
  options.n_group = group_count;
  options.topk_group = k_group;
  const auto gating = ops::moe_gating_top_k(x, or_undefined(bias), options, {}, Kernel::kFused);
  return {gating.weights_TK, gating.experts_TK.to(at::kInt),
          out_flag ? gating.scores_TE : no_result(gating.scores_TE)};
}

Tensor moe_gating_top_k_backward(const Tensor& x_norm, const Tensor& grad_y,
                                 const Tensor& expert_idx, int64_t renorm, int64_t norm_type,
                                 double routed_scaling_factor, double eps) {
  const GatingOptions options =
      gating_options("moe_gating_top_k_backward", renorm, norm_type, routed_scaling_factor, eps);
  check_shape(grad_y, expert_idx.sizes(), "moe_gating_top_k_backward: grad_y");
  const Tensor experts = expert_idx.to(at::kLong);
  if (x_norm.scalar_type() == at::kFloat && why_no_cpu_kernel(x_norm).empty()) {
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

void check_not_padded(const char* op, bool padded_mode, at::OptionalIntArrayRef restore_shape) {
  LONGHAUL_CHECK(!padded_mode && !restore_shape,
                 "{}: padded_mode and restore_shape are not supported", op);
}

// [T, k] of indices [T, k] or [T].
Tensor by_token(const Tensor& indices) {
  return (indices.dim() == 1 ? indices.unsqueeze(1) : indices).to(at::kLong);
}

// What the other operators need of moe_token_permute's order: the row of each choice; and the
// choice of each row, which only the reference asks for.
TokenOrder order_from(const Tensor& sorted_indices, int64_t k, bool for_reference) {
  const Tensor inverse = sorted_indices.to(at::kLong).contiguous();
  return {.order = for_reference ? inverse.argsort() : inverse,
          .inverse = inverse.view({-1, k}),
          .counts_E = {}};
}

std::tuple<Tensor, Tensor> moe_token_permute(const Tensor& tokens, const Tensor& indices,
                                             std::optional<int64_t> num_out_tokens,
                                             bool padded_mode) {
  const char* op = "moe_token_permute";
  const at::NoGradGuard no_grad;
  check_not_padded(op, padded_mode, std::nullopt);
  check_dims(tokens, 2, "moe_token_permute: tokens");
  LONGHAUL_CHECK(num_out_tokens.value_or(0) == 0 || *num_out_tokens == indices.numel(),
                 "{}: num_out_tokens is {}, all {} rows are kept", op, *num_out_tokens,
                 indices.numel());
  const Tensor experts = by_token(indices);
  const int64_t num_experts = experts.numel() == 0 ? 1 : experts.max().item<int64_t>() + 1;
  const auto order = sort_by_expert(experts, num_experts);
  return {ops::moe_token_permute(tokens, order, Kernel::kFused),
          order.inverse.flatten().to(at::kInt)};
}

Tensor moe_token_permute_grad(const Tensor& tokens, const Tensor& grad_permuted_tokens,
                              const Tensor& indices, const Tensor& sorted_indices,
                              bool padded_mode) {
  check_not_padded("moe_token_permute_grad", padded_mode, std::nullopt);
  check_dims(tokens, 2, "moe_token_permute_grad: tokens");
  check_shape(sorted_indices, {indices.numel()}, "moe_token_permute_grad: sorted_indices");
  check_shape(grad_permuted_tokens, {indices.numel(), tokens.size(1)},
              "moe_token_permute_grad: grad_permuted_tokens");
  const bool fused = why_no_cpu_kernel(tokens).empty();
  const TokenOrder order = order_from(sorted_indices, by_token(indices).size(1), !fused);
  const Tensor d_permuted = grad_permuted_tokens.to(tokens.scalar_type());
  if (fused) return ops::moe_token_permute_grad(d_permuted, order.inverse);
  const auto permute = [&](const std::vector<Tensor>& x) {
    return moe_token_permute_reference(x[0], order);
  };
  return reference_gradients(permute, {tokens}, d_permuted)[0];
}

// 1 for each choice where there are none.
Tensor probs_or_ones(const MaybeTensor& probs, const Tensor& permuted,
                     const Tensor& sorted_indices) {
  const Tensor found =
      probs ? *probs
            : at::ones({sorted_indices.numel(), 1}, permuted.options().dtype(wide_type(permuted)));
  check_shape(permuted, {sorted_indices.numel(), kAnySize}, "moe_token_unpermute: permuted_tokens");
  LONGHAUL_CHECK(found.dim() == 2 && found.numel() == sorted_indices.numel(),
                 "moe_token_unpermute: probs [{}] for {} sorted_indices", shape_text(found),
                 sorted_indices.numel());
  return found;
}

Tensor moe_token_unpermute(const Tensor& permuted_tokens, const Tensor& sorted_indices,
                           const MaybeTensor& probs, bool padded_mode,
                           at::OptionalIntArrayRef restore_shape) {
  const at::NoGradGuard no_grad;
  check_not_padded("moe_token_unpermute", padded_mode, restore_shape);
  const Tensor weights = probs_or_ones(probs, permuted_tokens, sorted_indices);
  const bool for_reference = !why_no_cpu_kernel(permuted_tokens).empty();
  return ops::moe_token_unpermute(permuted_tokens, weights,
                                  order_from(sorted_indices, weights.size(1), for_reference),
                                  Kernel::kFused);
}

std::tuple<Tensor, Tensor> moe_token_unpermute_grad(const Tensor& permuted_tokens,
                                                    const Tensor& grad_unpermuted_tokens,
                                                    const Tensor& sorted_indices,
                                                    const MaybeTensor& probs, bool padded_mode,
                                                    at::OptionalIntArrayRef restore_shape) {
  check_not_padded("moe_token_unpermute_grad", padded_mode, restore_shape);
  const Tensor weights = probs_or_ones(probs, permuted_tokens, sorted_indices);
  check_shape(grad_unpermuted_tokens, {weights.size(0), permuted_tokens.size(1)},
              "moe_token_unpermute_grad: grad_unpermuted_tokens");
  const bool fused = why_no_cpu_kernel(permuted_tokens).empty();
  const TokenOrder order = order_from(sorted_indices, weights.size(1), !fused);
  const Tensor d_tokens = grad_unpermuted_tokens.to(permuted_tokens.scalar_type());
  Tensor d_permuted, d_probs;
  if (fused) {
    const auto d = ops::moe_token_unpermute_grad(d_tokens, permuted_tokens, or_undefined(probs),
                                                 order.inverse);
    d_permuted = d.d_permuted;
    d_probs = d.d_probs_TK;
  } else {
    const auto d = reference_gradients(
        [&](const std::vector<Tensor>& x) {
          return moe_token_unpermute_reference(x[0], x[1], order);
        },
        {permuted_tokens, weights}, d_tokens);
    d_permuted = d[0];
    d_probs = d[1];
  }
  return {d_permuted, probs ? d_probs.to(probs->scalar_type()) : no_result(weights)};
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

std::tuple<Tensor, Tensor> moe_token_permute(const Tensor& tokens, const Tensor& indices,
                                             std::optional<int64_t> /*num_out_tokens*/,
                                             bool /*padded_mode*/) {
  const c10::SymInt rows = indices.sym_numel();
  return {sized(tokens, {rows, tokens.sym_size(1)}, tokens.scalar_type()),
          sized(tokens, {rows}, at::kInt)};
}

Tensor moe_token_permute_grad(const Tensor& tokens, const Tensor& /*grad_permuted_tokens*/,
                              const Tensor& /*indices*/, const Tensor& /*sorted_indices*/,
                              bool /*padded_mode*/) {
  return sized_like(tokens);
}

Tensor moe_token_unpermute(const Tensor& permuted_tokens, const Tensor& sorted_indices,
                           const MaybeTensor& probs, bool /*padded_mode*/,
                           at::OptionalIntArrayRef /*restore_shape*/) {
  return sized(
      permuted_tokens,
      {probs ? probs->sym_size(0) : sorted_indices.sym_numel(), permuted_tokens.sym_size(1)},
      permuted_tokens.scalar_type());
}

std::tuple<Tensor, Tensor> moe_token_unpermute_grad(const Tensor& permuted_tokens,
                                                    const Tensor& /*grad_unpermuted_tokens*/,
                                                    const Tensor& /*sorted_indices*/,
                                                    const MaybeTensor& probs, bool /*padded_mode*/,
                                                    at::OptionalIntArrayRef /*restore_shape*/) {
  return {sized_like(permuted_tokens),
          probs ? sized_like(*probs) : sized(permuted_tokens, {0}, wide_type(permuted_tokens))};
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

struct Permute : torch::autograd::Function<Permute> {
  static variable_list forward(AutogradContext* ctx, const Tensor& tokens, const Tensor& indices,
                               std::optional<int64_t> num_out_tokens, bool padded_mode) {
    static const auto op = find_operator<decltype(cpu::moe_token_permute)>("moe_token_permute");
    const at::AutoDispatchBelowADInplaceOrView guard;
    const auto [permuted, sorted_indices] = op.call(tokens, indices, num_out_tokens, padded_mode);
    ctx->save_for_backward({tokens, indices, sorted_indices});
    ctx->mark_non_differentiable({sorted_indices});
    return {permuted, sorted_indices};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto op =
        find_operator<decltype(cpu::moe_token_permute_grad)>("moe_token_permute_grad");
    const auto saved = ctx->get_saved_variables();
    return {op.call(saved[0], grads[0], saved[1], saved[2], /*padded_mode=*/false), Tensor(),
            Tensor(), Tensor()};
  }
};

std::tuple<Tensor, Tensor> moe_token_permute(const Tensor& tokens, const Tensor& indices,
                                             std::optional<int64_t> num_out_tokens,
                                             bool padded_mode) {
  const auto out = Permute::apply(tokens, indices, num_out_tokens, padded_mode);
  return {out[0], out[1]};
}

struct Unpermute : torch::autograd::Function<Unpermute> {
  static Tensor forward(AutogradContext* ctx, const Tensor& permuted, const MaybeTensor& probs,
                        const Tensor& sorted_indices, bool padded_mode,
                        at::OptionalIntArrayRef restore_shape) {
    static const auto op = find_operator<decltype(cpu::moe_token_unpermute)>("moe_token_unpermute");
    ctx->save_for_backward({permuted, or_undefined(probs), sorted_indices});
    const at::AutoDispatchBelowADInplaceOrView guard;
    return op.call(permuted, sorted_indices, probs, padded_mode, restore_shape);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto op =
        find_operator<decltype(cpu::moe_token_unpermute_grad)>("moe_token_unpermute_grad");
    const auto saved = ctx->get_saved_variables();
    const MaybeTensor probs = as_optional(saved[1]);
    const auto [d_permuted, d_probs] = op.call(saved[0], grads[0], saved[2], probs,
                                               /*padded_mode=*/false, std::nullopt);
    return {d_permuted, probs ? d_probs : Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

Tensor moe_token_unpermute(const Tensor& permuted_tokens, const Tensor& sorted_indices,
                           const MaybeTensor& probs, bool padded_mode,
                           at::OptionalIntArrayRef restore_shape) {
  return Unpermute::apply(permuted_tokens, probs, sorted_indices, padded_mode, restore_shape);
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
  m.def(
      "moe_token_permute(Tensor tokens, Tensor indices, int? num_out_tokens=None, "
      "bool padded_mode=False) -> (Tensor, Tensor)",
      kTags);
  m.def(
      "moe_token_permute_grad(Tensor tokens, Tensor grad_permuted_tokens, Tensor indices, "
      "Tensor sorted_indices, bool padded_mode=False) -> Tensor",
      kTags);
  m.def(
      "moe_token_unpermute(Tensor permuted_tokens, Tensor sorted_indices, Tensor? probs=None, "
      "bool padded_mode=False, int[]? restore_shape=None) -> Tensor",
      kTags);
  m.def(
      "moe_token_unpermute_grad(Tensor permuted_tokens, Tensor grad_unpermuted_tokens, "
      "Tensor sorted_indices, Tensor? probs=None, bool padded_mode=False, "
      "int[]? restore_shape=None) -> (Tensor, Tensor)",
      kTags);
}

TORCH_LIBRARY_IMPL(longhaul, CPU, m) {
  m.impl("moe_gating_top_k", cpu::moe_gating_top_k);
  m.impl("moe_gating_top_k_backward", cpu::moe_gating_top_k_backward);
  m.impl("moe_token_permute", cpu::moe_token_permute);
  m.impl("moe_token_permute_grad", cpu::moe_token_permute_grad);
  m.impl("moe_token_unpermute", cpu::moe_token_unpermute);
  m.impl("moe_token_unpermute_grad", cpu::moe_token_unpermute_grad);
}

TORCH_LIBRARY_IMPL(longhaul, Meta, m) {
  m.impl("moe_gating_top_k", meta::moe_gating_top_k);
  m.impl("moe_gating_top_k_backward", meta::moe_gating_top_k_backward);
  m.impl("moe_token_permute", meta::moe_token_permute);
  m.impl("moe_token_permute_grad", meta::moe_token_permute_grad);
  m.impl("moe_token_unpermute", meta::moe_token_unpermute);
  m.impl("moe_token_unpermute_grad", meta::moe_token_unpermute_grad);
}

TORCH_LIBRARY_IMPL(longhaul, Autograd, m) {
  m.impl("moe_gating_top_k", autograd::moe_gating_top_k);
  m.impl("moe_token_permute", autograd::moe_token_permute);
  m.impl("moe_token_unpermute", autograd::moe_token_unpermute);
  for (const char* gradient :
       {"moe_gating_top_k_backward", "moe_token_permute_grad", "moe_token_unpermute_grad"}) {
    m.impl(gradient, torch::autograd::autogradNotImplementedFallback());
  }
}

}  // namespace longhaul::ops::library
