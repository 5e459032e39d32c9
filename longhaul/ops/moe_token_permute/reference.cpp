#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "longhaul/base/error.h"
#include "longhaul/ops/common.h"
#include "longhaul/ops/matmul/matmul.h"
#include "longhaul/ops/moe_token_permute/moe_token_permute.h"

namespace longhaul::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The token that stands at each permuted row.
Tensor source_token(const Tensor& order, int64_t k) { return at::div(order, k, "floor"); }

// Rows of the permuted tensor by token: [T, k, D].
Tensor rows_by_token(const Tensor& permuted, const Tensor& inverse_TK) {
  return permuted.index_select(0, inverse_TK.reshape(-1))
      .view({inverse_TK.size(0), inverse_TK.size(1), permuted.size(1)});
}

// ATen's own backward of index_select adds row by row; gathering by the inverse is faster and its
// order of summation is fixed.
struct Permute : torch::autograd::Function<Permute> {
  static Tensor forward(AutogradContext* ctx, const Tensor& tokens, const Tensor& order,
                        const Tensor& inverse) {
    ctx->save_for_backward({inverse});
    return tokens.index_select(0, source_token(order, inverse.size(1)));
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Tensor inverse = ctx->get_saved_variables()[0];
    const auto wide = wide_type(grads[0]);
    const Tensor sum = rows_by_token(grads[0].contiguous(), inverse).to(wide).sum(1);
    return {sum.to(grads[0].scalar_type()), Tensor(), Tensor()};
  }
};

struct Unpermute : torch::autograd::Function<Unpermute> {
  static Tensor forward(AutogradContext* ctx, const Tensor& permuted, const Tensor& probs,
                        const Tensor& order, const Tensor& inverse) {
    ctx->save_for_backward({permuted, probs, order, inverse});
    const auto wide = wide_type(permuted);
    const Tensor rows = rows_by_token(permuted, inverse).to(wide);
    return product(probs.to(wide).unsqueeze(1), rows).squeeze(1).to(permuted.scalar_type());
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const Tensor &permuted = saved[0], &probs = saved[1], &order = saved[2], &inverse = saved[3];
    const auto wide = wide_type(permuted);
    const Tensor dy = grads[0].to(wide).contiguous();
    Tensor d_permuted, d_probs;
    if (ctx->needs_input_grad(0)) {
      const Tensor weight = probs.to(wide).reshape(-1).index_select(0, order).unsqueeze(1);
      d_permuted = (dy.index_select(0, source_token(order, inverse.size(1))).mul_(weight))
                       .to(permuted.scalar_type());
    }
    if (ctx->needs_input_grad(1)) {
      const Tensor rows = rows_by_token(permuted, inverse).to(wide);
      d_probs = product(rows, dy.unsqueeze(2)).squeeze(2).to(probs.scalar_type());
    }
    return {d_permuted, d_probs, Tensor(), Tensor()};
  }
};

}  // namespace

// Counts the rows of each expert, then gives each choice the next row of its expert.
TokenOrder sort_by_expert(const Tensor& experts_TK, int64_t num_experts) {
  check_dims(experts_TK, 2, "chosen experts");
  LONGHAUL_CHECK(experts_TK.scalar_type() == at::kLong, "chosen experts: expected int64, got {}",
                 c10::toString(experts_TK.scalar_type()));
  const int64_t n = experts_TK.numel();
  if (experts_TK.is_meta()) {
    return {.order = at::empty({n}, experts_TK.options()),
            .inverse = at::empty(experts_TK.sizes(), experts_TK.options()),
            .counts_E = at::empty({num_experts}, experts_TK.options())};
  }
  const Tensor host = experts_TK.cpu().contiguous();
  const int64_t* experts = host.const_data_ptr<int64_t>();
  std::vector<int64_t> starts(static_cast<size_t>(num_experts) + 2);
  for (int64_t i = 0; i < n; ++i) {
    LONGHAUL_CHECK(experts[i] >= 0 && experts[i] <= num_experts,
                   "chosen experts: expected 0 to {}, got {}", num_experts, experts[i]);
    ++starts[experts[i] + 1];
  }
  const Tensor order = at::empty({n}, host.options()), inverse = at::empty_like(host),
               counts = at::empty({num_experts}, host.options());
  std::copy_n(starts.begin() + 1, num_experts, counts.mutable_data_ptr<int64_t>());
  std::partial_sum(starts.begin(), starts.end(), starts.begin());
  int64_t *choice_of = order.mutable_data_ptr<int64_t>(),
          *row_of = inverse.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i < n; ++i) {
    row_of[i] = starts[experts[i]]++;
    choice_of[row_of[i]] = i;
  }
  const auto device = experts_TK.device();
  return {order.to(device), inverse.to(device), counts.to(device)};
}

Tensor moe_token_permute_reference(const Tensor& tokens_TD, const TokenOrder& order) {
  return Permute::apply(tokens_TD, order.order, order.inverse);
}

Tensor moe_token_unpermute_reference(const Tensor& permuted, const Tensor& probs_TK,
                                     const TokenOrder& order) {
  return Unpermute::apply(permuted, probs_TK, order.order, order.inverse);
}

}  // namespace longhaul::ops
