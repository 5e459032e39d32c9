#include "longhaul/ops/rms_norm/rms_norm.h"

#include <torch/csrc/autograd/custom_function.h>

#include "longhaul/ops/common.h"
#include "longhaul/ops/cpu/tensors.h"
#include "longhaul/ops/distributed.h"

namespace longhaul::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

void check_rows(const Tensor& x) {
  check_is_floating(x, "rms_norm: x");
  LONGHAUL_CHECK(x.dim() > 0, "rms_norm: x: expected at least 1 dimension, got [{}]",
                 shape_text(x));
}

Tensor as_weight(const Tensor& weight_D, const Tensor& x) {
  return weight_D.to(x.scalar_type()).contiguous();
}

struct RmsNorm : torch::autograd::Function<RmsNorm> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight_D, double eps) {
    const NormForward out = rms_norm_forward(x, {}, weight_D, eps);
    ctx->save_for_backward({x, weight_D, out.rstd});
    return out.y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const auto [d_x, d_weight] = rms_norm_grad(grads[0], saved[0], saved[1], saved[2], {});
    return {d_x, d_weight, Tensor()};
  }
};

struct RmsNormAdd : torch::autograd::Function<RmsNormAdd> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& residual,
                               const Tensor& weight_D, double eps) {
    const NormForward out = rms_norm_forward(x, residual, weight_D, eps);
    ctx->save_for_backward({out.sum, weight_D, out.rstd});
    ctx->set_materialize_grads(false);
    return {out.y, out.sum};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Tensor &dy = grads[0], &d_sum = grads[1];  // undefined where nothing depends on it
    if (!dy.defined()) return {d_sum, d_sum, Tensor(), Tensor()};
    const auto saved = ctx->get_saved_variables();
    const auto [d_x, d_weight] = rms_norm_grad(dy, saved[0], saved[1], saved[2], d_sum);
    return {d_x, d_x, d_weight, Tensor()};
  }
};

}  // namespace

NormForward rms_norm_forward(const Tensor& x, const Tensor& residual, const Tensor& weight_D,
                             double eps) {
  check_rows(x);
  LONGHAUL_CHECK(x.size(-1) > 0, "rms_norm: x [{}]: expected at least one feature", shape_text(x));
  if (const std::string reason = why_no_cpu_kernel(x); !reason.empty()) {
    report_fallback(residual.defined() ? "rms_norm_add" : "rms_norm", reason);
    return rms_norm_forward_reference(x, residual, weight_D, eps);
  }
  const int64_t D = x.size(-1), rows = x.numel() / D;
  const bool add = residual.defined();
  NormForward out = {at::empty(x.sizes(), x.options()),
                     add ? at::empty(x.sizes(), x.options()) : Tensor(),
                     at::empty({rows}, x.options().dtype(at::kFloat))};
  if (x.is_meta()) return out;
  const Tensor x_RD = as_rows(x, {rows, D}), weight = as_weight(weight_D, x);
  const Tensor residual_RD = add ? as_rows(residual, {rows, D}) : Tensor();
  run_kernel("rms_norm", longhaul_rms_norm,
             longhaul_rms_norm_args{.dtype = kernel_dtype(x),
                                    .rows = rows,
                                    .D = D,
                                    .x_stride = x_RD.stride(0),
                                    .eps = static_cast<float>(eps),
                                    .x = x_RD.const_data_ptr(),
                                    .weight = weight.const_data_ptr(),
                                    .y = out.y.data_ptr(),
                                    .rstd = out.rstd.data_ptr<float>(),
                                    .residual_stride = add ? residual_RD.stride(0) : 0,
                                    .residual = add ? residual_RD.const_data_ptr() : nullptr,
                                    .sum = add ? out.sum.data_ptr() : nullptr});
  return out;
}

NormGradients rms_norm_grad(const Tensor& dy, const Tensor& x, const Tensor& weight_D,
                            const Tensor& rstd, const Tensor& d_sum) {
  if (const std::string reason = why_no_cpu_kernel(x); !reason.empty()) {
    report_fallback("rms_norm_grad", reason);
    return rms_norm_grad_reference(dy, x, weight_D, rstd, d_sum);
  }
  const int64_t D = x.size(-1), rows = rstd.numel();
  const Tensor d_x = at::empty(x.sizes(), x.options());
  const Tensor d_weight = at::empty({D}, rstd.options());
  if (!x.is_meta()) {
    const Tensor x_RD = as_rows(x, {rows, D}), dy_RD = as_rows(dy, {rows, D});
    const Tensor d_sum_RD = d_sum.defined() ? as_rows(d_sum, {rows, D}) : Tensor();
    const Tensor weight = as_weight(weight_D, x);
    run_kernel("rms_norm_grad", longhaul_rms_norm_grad, longhaul_rms_norm_grad_workspace,
               longhaul_rms_norm_grad_args{
                   .dtype = kernel_dtype(x),
                   .rows = rows,
                   .D = D,
                   .dy_stride = dy_RD.stride(0),
                   .x_stride = x_RD.stride(0),
                   .dy = dy_RD.const_data_ptr(),
                   .x = x_RD.const_data_ptr(),
                   .weight = weight.const_data_ptr(),
                   .rstd = rstd.const_data_ptr<float>(),
                   .d_x = d_x.data_ptr(),
                   .d_weight = d_weight.data_ptr<float>(),
                   .d_sum_stride = d_sum.defined() ? d_sum_RD.stride(0) : 0,
                   .d_sum = d_sum.defined() ? d_sum_RD.const_data_ptr() : nullptr});
  }
  return {d_x, d_weight.to(weight_D.scalar_type())};
}

Tensor rms_norm(const Tensor& x, const Tensor& weight_D, double eps, Kernel kernel) {
  if (is_distributed_tensor(x)) {
    return distributed<Tensor(const Tensor&, const Tensor&, double, int64_t)>("rms_norm")
        .call(x, weight_D, eps, static_cast<int64_t>(kernel));
  }
  check_rows(x);
  check_shape(weight_D, {x.size(-1)}, "rms_norm: weight");
  if (kernel == Kernel::kFused) {
    const std::string reason = why_no_cpu_kernel(x);
    if (reason.empty()) return RmsNorm::apply(x, weight_D, eps);
    report_fallback("rms_norm", reason);
  }
  return rms_norm_reference(x, weight_D, eps);
}

NormedSum rms_norm_add(const Tensor& x, const Tensor& residual, const Tensor& weight_D, double eps,
                       Kernel kernel) {
  if (is_distributed_tensor(x)) {
    using Signature =
        std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, double, int64_t);
    const auto [y, sum] = distributed<Signature>("rms_norm_add")
                              .call(x, residual, weight_D, eps, static_cast<int64_t>(kernel));
    return {y, sum};
  }
  check_rows(x);
  check_shape(weight_D, {x.size(-1)}, "rms_norm_add: weight");
  check_shape(residual, x.sizes(), "rms_norm_add: residual");
  check_same_dtype(residual, x, "rms_norm_add: residual", "x");
  if (kernel == Kernel::kFused) {
    const std::string reason = why_no_cpu_kernel(x);
    if (reason.empty()) {
      const auto results = RmsNormAdd::apply(x, residual, weight_D, eps);
      return {results[0], results[1]};
    }
    report_fallback("rms_norm_add", reason);
  }
  const Tensor sum = x + residual;
  return {rms_norm_reference(sum, weight_D, eps), sum};
}

}  // namespace longhaul::ops
