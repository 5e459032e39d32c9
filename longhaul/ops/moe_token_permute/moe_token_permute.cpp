#include "longhaul/ops/moe_token_permute/moe_token_permute.h"

#include <torch/csrc/autograd/custom_function.h>

#include "longhaul/ops/common.h"
#include "longhaul/ops/cpu/tensors.h"

namespace longhaul::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Operands that are not there are undefined tensors.
template <typename T>
T* data_or_null(const Tensor& x) {
  return x.defined() ? x.data_ptr<T>() : nullptr;
}

// What both directions do forward, and each other's gradient. `probs` is undefined where all are 1.
Tensor to_experts(const Tensor& tokens_in, const Tensor& probs_TK, const Tensor& inverse_TK,
                  const Tensor& rows = {}, const Tensor& d_probs_TK = {}) {
  const int64_t T = inverse_TK.size(0), k = inverse_TK.size(1), D = tokens_in.size(1);
  Tensor permuted = at::empty({T * k, D}, tokens_in.options());
  if (tokens_in.is_meta()) return permuted;
  const Tensor tokens = tokens_in.contiguous();
  run_kernel("moe_token_permute", longhaul_moe_token_permute,
             longhaul_moe_token_permute_args{.dtype = kernel_dtype(tokens),
                                             .T = T,
                                             .k = k,
                                             .D = D,
                                             .tokens = tokens.const_data_ptr(),
                                             .inverse = inverse_TK.const_data_ptr<int64_t>(),
                                             .probs = data_or_null<float>(probs_TK),
                                             .permuted = permuted.data_ptr(),
                                             .rows = rows.defined() ? rows.data_ptr() : nullptr,
                                             .d_probs = data_or_null<float>(d_probs_TK)});
  return permuted;
}

Tensor to_tokens(const Tensor& permuted_in, const Tensor& probs_TK, const Tensor& inverse_TK) {
  const int64_t T = inverse_TK.size(0), k = inverse_TK.size(1), D = permuted_in.size(1);
  Tensor tokens = at::empty({T, D}, permuted_in.options());
  if (permuted_in.is_meta()) return tokens;
  const Tensor permuted = permuted_in.contiguous();
  run_kernel("moe_token_unpermute", longhaul_moe_token_unpermute,
             longhaul_moe_token_unpermute_args{.dtype = kernel_dtype(permuted),
                                               .T = T,
                                               .k = k,
                                               .D = D,
                                               .permuted = permuted.const_data_ptr(),
                                               .inverse = inverse_TK.const_data_ptr<int64_t>(),
                                               .probs = data_or_null<float>(probs_TK),
                                               .tokens = tokens.data_ptr()});
  return tokens;
}

struct FusedPermute : torch::autograd::Function<FusedPermute> {
  static Tensor forward(AutogradContext* ctx, const Tensor& tokens, const Tensor& inverse) {
    ctx->save_for_backward({inverse});
    return to_experts(tokens, {}, inverse);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return {moe_token_permute_grad(grads[0], ctx->get_saved_variables()[0]), Tensor()};
  }
};

struct FusedUnpermute : torch::autograd::Function<FusedUnpermute> {
  static Tensor forward(AutogradContext* ctx, const Tensor& permuted_in, const Tensor& probs_in,
                        const Tensor& inverse) {
    const Tensor permuted = permuted_in.contiguous(), probs = probs_in.to(at::kFloat).contiguous();
    ctx->save_for_backward({permuted, probs, inverse});
    ctx->saved_data["probs_dtype"] = probs_in.scalar_type();
    return to_tokens(permuted, probs, inverse);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const auto [d_permuted, d_probs] =
        moe_token_unpermute_grad(grads[0], saved[0], saved[1], saved[2]);
    return {d_permuted, d_probs.to(ctx->saved_data["probs_dtype"].toScalarType()), Tensor()};
  }
};

}  // namespace

Tensor moe_token_permute_grad(const Tensor& d_permuted, const Tensor& inverse_TK) {
  return to_tokens(d_permuted, {}, inverse_TK);
}

UnpermuteGradients moe_token_unpermute_grad(const Tensor& d_tokens_TD, const Tensor& permuted_in,
                                            const Tensor& probs_TK, const Tensor& inverse_TK) {
  if (!probs_TK.defined()) return {to_experts(d_tokens_TD, {}, inverse_TK), {}};
  const Tensor permuted = permuted_in.contiguous(), probs = probs_TK.to(at::kFloat).contiguous();
  const Tensor d_probs = at::empty_like(probs);
  const Tensor d_permuted = to_experts(d_tokens_TD, probs, inverse_TK, permuted, d_probs);
  return {d_permuted, d_probs};
}

Tensor moe_token_permute(const Tensor& tokens_TD, const TokenOrder& order, Kernel kernel) {
  check_shape(tokens_TD, {order.inverse.size(0), kAnySize}, "permute: tokens");
  if (kernel == Kernel::kFused) {
    const std::string reason = why_no_cpu_kernel(tokens_TD);
    if (reason.empty()) return FusedPermute::apply(tokens_TD, order.inverse.contiguous());
    report_fallback("moe_token_permute", reason);
  }
  return moe_token_permute_reference(tokens_TD, order);
}

Tensor moe_token_unpermute(const Tensor& permuted, const Tensor& probs_TK, const TokenOrder& order,
                           Kernel kernel) {
  check_shape(probs_TK, order.inverse.sizes(), "unpermute: probs");
  check_shape(permuted, {order.order.numel(), kAnySize}, "unpermute: rows");
  if (kernel == Kernel::kFused) {
    const std::string reason = why_no_cpu_kernel(permuted);
    if (reason.empty()) {
      return FusedUnpermute::apply(permuted, probs_TK, order.inverse.contiguous());
    }
    report_fallback("moe_token_unpermute", reason);
  }
  return moe_token_unpermute_reference(permuted, probs_TK, order);
}

}  // namespace longhaul::ops
