// The experts' products.
#include "longhaul/ops/grouped_matmul/grouped_matmul.h"

#include "longhaul/ops/library/operators.h"

namespace longhaul::ops::library {
namespace {

namespace cpu {

Tensor grouped_matmul(const Tensor& x, const Tensor& weight, const Tensor& group_list) {
  const at::NoGradGuard no_grad;
  return ops::grouped_matmul(x, weight, group_list.to(at::kLong), Kernel::kFused);
}

std::tuple<Tensor, Tensor> grouped_matmul_grad(const Tensor& grad, const Tensor& x,
                                               const Tensor& weight, const Tensor& group_list,
                                               Mask2 output_mask) {
  const auto d =
      ops::grouped_matmul_grad(grad.to(x.scalar_type()), x, weight, group_list.to(at::kLong),
                               {.d_x = output_mask[0], .d_weight = output_mask[1]});
  return {output_mask[0] ? d.d_x : no_result(x), output_mask[1] ? d.d_weight : no_result(weight)};
}

}  // namespace cpu

namespace meta {

Tensor grouped_matmul(const Tensor& x, const Tensor& weight, const Tensor& /*group_list*/) {
  return sized(x, {x.sym_size(0), weight.sym_size(1)}, x.scalar_type());
}

std::tuple<Tensor, Tensor> grouped_matmul_grad(const Tensor& /*grad*/, const Tensor& x,
                                               const Tensor& weight, const Tensor& /*group_list*/,
                                               Mask2 output_mask) {
  return {output_mask[0] ? sized_like(x) : no_result(x),
          output_mask[1] ? sized_like(weight) : no_result(weight)};
}

}  // namespace meta

namespace autograd {

struct GroupedMatmul : torch::autograd::Function<GroupedMatmul> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                        const Tensor& group_list) {
    static const auto op = find_operator<decltype(cpu::grouped_matmul)>("grouped_matmul");
    ctx->save_for_backward({x, weight, group_list});
    const at::AutoDispatchBelowADInplaceOrView guard;
    return op.call(x, weight, group_list);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto op = find_operator<decltype(cpu::grouped_matmul_grad)>("grouped_matmul_grad");
    const auto saved = ctx->get_saved_variables();
    const Mask2 wanted = {ctx->needs_input_grad(0), ctx->needs_input_grad(1)};
    const auto [d_x, d_weight] = op.call(grads[0], saved[0], saved[1], saved[2], wanted);
    return {wanted[0] ? d_x : Tensor(), wanted[1] ? d_weight : Tensor(), Tensor()};
  }
};

Tensor grouped_matmul(const Tensor& x, const Tensor& weight, const Tensor& group_list) {
  return GroupedMatmul::apply(x, weight, group_list);
}

}  // namespace autograd
}  // namespace

TORCH_LIBRARY_FRAGMENT(longhaul, m) {
  m.def("grouped_matmul(Tensor x, Tensor weight, Tensor group_list) -> Tensor", kTags);
  m.def(
      "grouped_matmul_grad(Tensor grad, Tensor x, Tensor weight, Tensor group_list, "
      "bool[2] output_mask) -> (Tensor, Tensor)",
      kTags);
}

TORCH_LIBRARY_IMPL(longhaul, CPU, m) {
  m.impl("grouped_matmul", cpu::grouped_matmul);
  m.impl("grouped_matmul_grad", cpu::grouped_matmul_grad);
}

TORCH_LIBRARY_IMPL(longhaul, Meta, m) {
  m.impl("grouped_matmul", meta::grouped_matmul);
  m.impl("grouped_matmul_grad", meta::grouped_matmul_grad);
}

TORCH_LIBRARY_IMPL(longhaul, Autograd, m) {
  m.impl("grouped_matmul", autograd::grouped_matmul);
  m.impl("grouped_matmul_grad", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace longhaul::ops::library
