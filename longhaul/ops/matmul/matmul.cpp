#include "longhaul/ops/matmul/matmul.h"

#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "longhaul/base/error.h"
#include "longhaul/ops/common.h"
#include "longhaul/ops/distributed.h"
#include "longhaul/ops/saved_results.h"

namespace longhaul::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// [..., K] as [rows, K], also where K is 0.
Tensor rows(const Tensor& x) { return x.dim() == 1 ? x.unsqueeze(0) : x.flatten(0, -2); }

Tensor linear_product(const Tensor& x, const Tensor& weight_NK) {
  auto shape = x.sizes().vec();
  shape.back() = weight_NK.size(0);
  return product(rows(x), weight_NK.t()).view(shape);
}

using LinearGradients = std::tuple<Tensor, Tensor>(const Tensor& dy, const Tensor& x,
                                                   const Tensor& weight_NK,
                                                   std::array<bool, 2> wanted);

std::tuple<Tensor, Tensor> linear_gradients(const Tensor& dy, const Tensor& x,
                                            const Tensor& weight_NK, std::array<bool, 2> wanted) {
  Tensor dx, dw;
  if (wanted[0]) dx = product(rows(dy), weight_NK).view(x.sizes());
  if (wanted[1]) dw = product(rows(dy).t(), rows(x));
  return {dx, dw};
}

// What a distributed product computes on each rank's parts.
TORCH_LIBRARY_IMPL(longhaul_model, CPU, m) {
  m.impl("linear", linear_product);
  m.impl("linear_grad", linear_gradients);
}
TORCH_LIBRARY_IMPL(longhaul_model, Meta, m) {
  m.impl("linear", linear_product);
  m.impl("linear_grad", linear_gradients);
}

struct LinearFunction : torch::autograd::Function<LinearFunction> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight_NK) {
    ctx->save_for_backward({x, weight_NK});
    return saved_or_computed({.op = "linear", .weight_NK = weight_NK.sizes()}, [&] {
      if (is_distributed_tensor(x)) {
        return distributed<Tensor(const Tensor&, const Tensor&)>("linear").call(x, weight_NK);
      }
      return linear_product(x, weight_NK);
    });
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const Tensor &dy = grads[0], &x = saved[0], &weight_NK = saved[1];
    const std::array<bool, 2> wanted = {ctx->needs_input_grad(0), ctx->needs_input_grad(1)};
    const auto [dx, dw] =
        is_distributed_tensor(dy)
            ? distributed<LinearGradients>("linear_grad").call(dy, x, weight_NK, wanted)
            : linear_gradients(dy, x, weight_NK, wanted);
    return {dx, dw};
  }
};

struct BmmFunction : torch::autograd::Function<BmmFunction> {
  // `op`: what it is the whole of (see saved_results.h); nullptr for a step of something larger.
  static Tensor forward(AutogradContext* ctx, const Tensor& a, const Tensor& b, const char* op) {
    ctx->save_for_backward({a, b});
    if (op == nullptr) return product(a, b);
    return saved_or_computed({.op = op}, [&] { return product(a, b); });
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    Tensor da, db;
    if (ctx->needs_input_grad(0)) da = product(grads[0], saved[1].transpose(1, 2));
    if (ctx->needs_input_grad(1)) db = product(saved[0].transpose(1, 2), grads[0]);
    return {da, db, Tensor()};
  }
};

}  // namespace

Tensor linear(const Tensor& x, const Tensor& weight_NK) {
  LONGHAUL_CHECK(weight_NK.dim() == 2 && x.size(-1) == weight_NK.size(1),
                 "linear: weight: expected [N, {}], got [{}]", x.size(-1), shape_text(weight_NK));
  check_same_dtype(weight_NK, x, "linear: weight", "the input");
  return LinearFunction::apply(x, weight_NK);
}

Tensor linear_by_head(const Tensor& x_BSHI, const Tensor& weight_HIO) {
  if (is_distributed_tensor(x_BSHI)) {
    return distributed<Tensor(const Tensor&, const Tensor&)>("linear_by_head")
        .call(x_BSHI, weight_HIO);
  }
  const int64_t B = x_BSHI.size(0), S = x_BSHI.size(1), H = x_BSHI.size(2);
  const Tensor x_HTI = x_BSHI.reshape({B * S, H, x_BSHI.size(3)}).transpose(0, 1);
  check_same_dtype(weight_HIO, x_HTI, "linear_by_head: weight", "the input");
  return BmmFunction::apply(x_HTI, weight_HIO, "linear_by_head")
      .transpose(0, 1)
      .reshape({B, S, H, weight_HIO.size(2)});
}

Tensor bmm(const Tensor& a_BMK, const Tensor& b_BKN) {
  check_same_dtype(b_BKN, a_BMK, "bmm: second factor", "the first");
  return BmmFunction::apply(a_BMK, b_BKN, nullptr);
}

}  // namespace longhaul::ops
