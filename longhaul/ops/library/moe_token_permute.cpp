// Tokens in the order of their experts, and back.
#include "longhaul/ops/moe_token_permute/moe_token_permute.h"

#include <ATen/core/grad_mode.h>
#include <fmt/ranges.h>

#include "longhaul/ops/library/operators.h"

namespace longhaul::ops::library {
namespace {

namespace cpu {

void check_not_padded(const char* op, bool padded_mode, at::OptionalIntArrayRef restore_shape) {
  LONGHAUL_CHECK(!padded_mode, "{}: padded_mode is not supported: expected False, got True", op);
  LONGHAUL_CHECK(!restore_shape, "{}: restore_shape is not supported: expected None, got [{}]", op,
                 fmt::join(*restore_shape, ", "));
}

// [T, k] of indices [T, k] or [T].
Tensor by_token(const Tensor& indices) {
  return (indices.dim() == 1 ? indices.unsqueeze(1) : indices).to(at::kLong);
}

// Where rows stood twice, others would never be written.
void check_permutation(const Tensor& sorted_indices) {
  const int64_t n = sorted_indices.numel();
  const int64_t* indices = sorted_indices.const_data_ptr<int64_t>();
  std::vector<bool> seen(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) {
    const bool there = indices[i] >= 0 && indices[i] < n;
    LONGHAUL_CHECK(there && !seen[indices[i]],
                   "sorted_indices: expected each of 0 to {} once, got {} {}", n - 1, indices[i],
                   there ? "twice" : "too");
    seen[indices[i]] = true;
  }
}

// What the other operators need of moe_token_permute's order: the row of each choice; and the
// choice of each row, which only the reference asks for.
TokenOrder order_from(const Tensor& sorted_indices, int64_t k, bool for_reference) {
  const Tensor inverse = to_int64(sorted_indices, "sorted_indices").contiguous();
  check_permutation(inverse);
  return {.order = for_reference ? inverse.argsort() : inverse,
          .inverse = inverse.view({-1, k}),
          .counts_E = {}};
}

constexpr int64_t kMostExperts = 1 << 16;  // their rows are counted one by one

std::tuple<Tensor, Tensor> moe_token_permute(const Tensor& tokens, const Tensor& indices,
                                             std::optional<int64_t> num_out_tokens,
                                             bool padded_mode) {
  const char* op = "moe_token_permute";
  const at::NoGradGuard no_grad;
  check_not_padded(op, padded_mode, std::nullopt);
  check_dims(tokens, 2, "moe_token_permute: tokens");
  LONGHAUL_CHECK(num_out_tokens.value_or(0) == 0 || *num_out_tokens == indices.numel(),
                 "{}: num_out_tokens: expected 0 or {} (all rows), got {}", op, indices.numel(),
                 *num_out_tokens);
  check_values(indices, 0, kMostExperts - 1, "moe_token_permute: indices");
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
  check_shape(tokens, {by_token(indices).size(0), kAnySize}, "moe_token_permute_grad: tokens");
  check_shape(sorted_indices, {indices.numel()}, "moe_token_permute_grad: sorted_indices");
  check_shape(grad_permuted_tokens, {indices.numel(), tokens.size(1)},
              "moe_token_permute_grad: grad_permuted_tokens");
  const bool fused = takes_kernel("moe_token_permute_grad", why_no_cpu_kernel(tokens));
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
                 "moe_token_unpermute: probs: expected [T, k] with T k = {}, the number of "
                 "sorted_indices, got [{}]",
                 sorted_indices.numel(), shape_text(found));
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
  const bool fused = takes_kernel("moe_token_unpermute_grad", why_no_cpu_kernel(permuted_tokens));
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
  m.impl("moe_token_permute", cpu::moe_token_permute);
  m.impl("moe_token_permute_grad", cpu::moe_token_permute_grad);
  m.impl("moe_token_unpermute", cpu::moe_token_unpermute);
  m.impl("moe_token_unpermute_grad", cpu::moe_token_unpermute_grad);
}

TORCH_LIBRARY_IMPL(longhaul, Meta, m) {
  m.impl("moe_token_permute", meta::moe_token_permute);
  m.impl("moe_token_permute_grad", meta::moe_token_permute_grad);
  m.impl("moe_token_unpermute", meta::moe_token_unpermute);
  m.impl("moe_token_unpermute_grad", meta::moe_token_unpermute_grad);
}

TORCH_LIBRARY_IMPL(longhaul, Autograd, m) {
  m.impl("moe_token_permute", autograd::moe_token_permute);
  m.impl("moe_token_unpermute", autograd::moe_token_unpermute);
  for (const char* gradient : {"moe_token_permute_grad", "moe_token_unpermute_grad"}) {
    m.impl(gradient, torch::autograd::autogradNotImplementedFallback());
  }
}

}  // namespace longhaul::ops::library
