#include <torch/csrc/autograd/custom_function.h>

#include "longhaul/ops/common.h"
#include "longhaul/ops/cpu/tensors.h"
#include "longhaul/ops/rms_norm/rms_norm.h"

namespace longhaul::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct RmsNormAdd : torch::autograd::Function<RmsNormAdd> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& residual,
                               const Tensor& weight_D, double eps) {
    const int64_t D = x.size(-1), rows = D == 0 ? 0 : x.numel() / D;
    Tensor y = at::empty(x.sizes(), x.options()), sum = at::empty(x.sizes(), x.options());
    const Tensor rstd = at::empty({rows}, x.options().dtype(at::kFloat));
    ctx->save_for_backward({sum, weight_D, rstd});
    ctx->set_materialize_grads(false);
    if (x.is_meta() || D == 0) return {y, sum};
    const Tensor x_RD = as_rows(x, {rows, D}), residual_RD = as_rows(residual, {rows, D});
    const Tensor weight = weight_D.to(x.scalar_type()).contiguous();
    run_kernel("rms_norm_add", longhaul_rms_norm,
               longhaul_rms_norm_args{.dtype = kernel_dtype(x),
                                      .rows = rows,
                                      .D = D,
                                      .x_stride = x_RD.stride(0),
                                      .eps = static_cast<float>(eps),
                                      .x = x_RD.const_data_ptr(),
                                      .weight = weight.const_data_ptr(),
                                      .y = y.data_ptr(),
                                      .rstd = rstd.data_ptr<float>(),
                                      .residual_stride = residual_RD.stride(0),
                                      .residual = residual_RD.const_data_ptr(),
                                      .sum = sum.data_ptr()});
    return {y, sum};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Tensor &dy = grads[0], &d_sum = grads[1];  // undefined where nothing depends on it
    if (!dy.defined()) return {d_sum, d_sum, Tensor(), Tensor()};
    const auto saved = ctx->get_saved_variables();
    const Tensor d_weight = at::empty(saved[1].sizes(), saved[2].options());
    const Tensor d_x = gradient(dy, d_sum, saved, d_weight);
    return {d_x, d_x, d_weight.to(saved[1].scalar_type()), Tensor()};
  }

  static Tensor gradient(const Tensor& dy, const Tensor& d_sum, const variable_list& saved,
                         const Tensor& d_weight) {
    const Tensor &sum = saved[0], &weight_D = saved[1], &rstd = saved[2];
    const int64_t D = sum.size(-1), rows = rstd.numel();
    Tensor d_x = at::empty(sum.sizes(), sum.options());
    if (sum.is_meta() || D == 0) return d_x;
    const Tensor dy_RD = as_rows(dy, {rows, D}),
                 weight = weight_D.to(sum.scalar_type()).contiguous();
    const Tensor d_sum_RD = d_sum.defined() ? as_rows(d_sum, {rows, D}) : Tensor();
    run_kernel("rms_norm_add_grad", longhaul_rms_norm_grad, longhaul_rms_norm_grad_workspace,
               longhaul_rms_norm_grad_args{
                   .dtype = kernel_dtype(sum),
                   .rows = rows,
                   .D = D,
                   .dy_stride = dy_RD.stride(0),
                   .x_stride = D,
                   .dy = dy_RD.const_data_ptr(),
                   .x = sum.const_data_ptr(),
                   .weight = weight.const_data_ptr(),
                   .rstd = rstd.const_data_ptr<float>(),
                   .d_x = d_x.data_ptr(),
                   .d_weight = d_weight.data_ptr<float>(),
                   .d_sum_stride = d_sum.defined() ? d_sum_RD.stride(0) : 0,
                   .d_sum = d_sum.defined() ? d_sum_RD.const_data_ptr() : nullptr});
    return d_x;
  }
};

}  // namespace

NormedSum rms_norm_add(const Tensor& x, const Tensor& residual, const Tensor& weight_D, double eps,
                       Kernel kernel) {
  check_shape(weight_D, {x.size(-1)}, "rms_norm_add: weight");
  check_shape(residual, x.sizes(), "rms_norm_add: residual");
  LONGHAUL_CHECK(x.scalar_type() == residual.scalar_type(), "rms_norm_add: x is {}, residual {}",
                 c10::toString(x.scalar_type()), c10::toString(residual.scalar_type()));
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
