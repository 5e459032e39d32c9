#include "longhaul/ops/rms_norm/rms_norm.h"

#include <torch/csrc/autograd/custom_function.h>

#include "longhaul/ops/common.h"
#include "longhaul/ops/cpu/tensors.h"

namespace longhaul::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct RmsNorm : torch::autograd::Function<RmsNorm> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight_D, double eps) {
    const int64_t D = x.size(-1), rows = D == 0 ? 0 : x.numel() / D;
    Tensor y = at::empty(x.sizes(), x.options());
    const Tensor rstd = at::empty({rows}, x.options().dtype(at::kFloat));
    ctx->save_for_backward({x, weight_D, rstd});
    if (x.is_meta() || D == 0) return y;
    const Tensor x_RD = as_rows(x, {rows, D}), weight = weight_D.to(x.scalar_type()).contiguous();
    run_kernel("rms_norm", longhaul_rms_norm,
               longhaul_rms_norm_args{.dtype = kernel_dtype(x),
                                      .rows = rows,
                                      .D = D,
                                      .x_stride = x_RD.stride(0),
                                      .eps = static_cast<float>(eps),
                                      .x = x_RD.const_data_ptr(),
                                      .weight = weight.const_data_ptr(),
                                      .y = y.data_ptr(),
                                      .rstd = rstd.data_ptr<float>(),
                                      .residual_stride = 0,
                                      .residual = nullptr,
                                      .sum = nullptr});
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &weight_D = saved[1], &rstd = saved[2];
    const int64_t D = x.size(-1), rows = rstd.numel();
    const Tensor d_x = at::empty(x.sizes(), x.options());
    const Tensor d_weight = at::empty({D}, rstd.options());
    if (!x.is_meta() && D > 0) {
      const Tensor x_RD = as_rows(x, {rows, D}), dy_RD = as_rows(grads[0], {rows, D});
      const Tensor weight = weight_D.to(x.scalar_type()).contiguous();
      run_kernel("rms_norm_grad", longhaul_rms_norm_grad, longhaul_rms_norm_grad_workspace,
                 longhaul_rms_norm_grad_args{.dtype = kernel_dtype(x),
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
                                             .d_sum_stride = 0,
                                             .d_sum = nullptr});
    }
    return {d_x, d_weight.to(weight_D.scalar_type()), Tensor()};
  }
};

}  // namespace

Tensor rms_norm(const Tensor& x, const Tensor& weight_D, double eps, Kernel kernel) {
  check_shape(weight_D, {x.size(-1)}, "rms_norm: weight");
  if (kernel == Kernel::kFused) {
    const std::string reason = why_no_cpu_kernel(x);
    if (reason.empty()) return RmsNorm::apply(x, weight_D, eps);
    report_fallback("rms_norm", reason);
  }
  return rms_norm_reference(x, weight_D, eps);
}

}  // namespace longhaul::ops
