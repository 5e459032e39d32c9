#include "longhaul/ops/matmul/matmul.h"

#include <torch/csrc/autograd/custom_function.h>

#include "longhaul/base/error.h"
#include "longhaul/ops/common.h"

namespace longhaul::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// [..., K] as [rows, K], also where K is 0.
Tensor rows(const Tensor& x) { return x.dim() == 1 ? x.unsqueeze(0) : x.flatten(0, -2); }

struct LinearFunction : torch::autograd::Function<LinearFunction> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight_NK) {
    ctx->save_for_backward({x, weight_NK});
    auto shape = x.sizes().vec();
    shape.back() = weight_NK.size(0);
    return product(rows(x), weight_NK.t()).view(shape);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &weight_NK = saved[1];
    const Tensor dy = rows(grads[0]);
    Tensor dx, dw;
    if (ctx->needs_input_grad(0)) dx = product(dy, weight_NK).view(x.sizes());
    if (ctx->needs_input_grad(1)) dw = product(dy.t(), rows(x));
    return {dx, dw};
  }
};

struct BmmFunction : torch::autograd::Function<BmmFunction> {
  static Tensor forward(AutogradContext* ctx, const Tensor& a, const Tensor& b) {
    ctx->save_for_backward({a, b});
    return product(a, b);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    Tensor da, db;
    if (ctx->needs_input_grad(0)) da = product(grads[0], saved[1].transpose(1, 2));
    if (ctx->needs_input_grad(1)) db = product(saved[0].transpose(1, 2), grads[0]);
    return {da, db};
  }
};

void check_same_dtype(const Tensor& a, const Tensor& b) {
  LONGHAUL_CHECK(a.scalar_type() == b.scalar_type(), "product of {} and {}",
                 c10::toString(a.scalar_type()), c10::toString(b.scalar_type()));
}

}  // namespace

Tensor linear(const Tensor& x, const Tensor& weight_NK) {
  LONGHAUL_CHECK(weight_NK.dim() == 2 && x.size(-1) == weight_NK.size(1),
                 "linear: input [{}], weight [{}]", shape_text(x), shape_text(weight_NK));
  check_same_dtype(x, weight_NK);
  return LinearFunction::apply(x, weight_NK);
}

Tensor bmm(const Tensor& a_BMK, const Tensor& b_BKN) {
  check_same_dtype(a_BMK, b_BKN);
  return BmmFunction::apply(a_BMK, b_BKN);
}

}  // namespace longhaul::ops
