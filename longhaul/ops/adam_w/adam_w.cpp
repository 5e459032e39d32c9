#include "longhaul/ops/adam_w/adam_w.h"

#include <ATen/ATen.h>

#include "longhaul/ops/common.h"
#include "longhaul/ops/cpu/tensors.h"
#include "longhaul/ops/kernel.h"

namespace longhaul::ops {
namespace {

void check(const AdamWUpdate& u) {
  LONGHAUL_CHECK(u.step >= 1, "adam_w: step: expected at least 1, got {}", u.step);
  check_shape(u.grad, u.param.sizes(), "adam_w: grad");
  check_shape(u.exp_avg, u.param.sizes(), "adam_w: exp_avg");
  check_shape(u.exp_avg_sq, u.param.sizes(), "adam_w: exp_avg_sq");
}

void check(const AdamWOptions& o) {
  const auto check_at_least_0 = [](double x, const char* what) {
    LONGHAUL_CHECK(x >= 0, "adam_w: {}: expected at least 0, got {}", what, x);
  };
  const auto check_decay = [](double beta, const char* what) {
    LONGHAUL_CHECK(beta >= 0 && beta < 1, "adam_w: {}: expected 0 to below 1, got {}", what, beta);
  };
  check_at_least_0(o.lr, "lr");
  check_at_least_0(o.eps, "eps");
  check_at_least_0(o.weight_decay, "weight_decay");
  check_decay(o.beta1, "beta1");
  check_decay(o.beta2, "beta2");
}

// Empty if the kernel can update that, else why not. What is changed must be where it is; a
// gradient may be copied.
std::string why_no_kernel(const AdamWUpdate& u) {
  const auto dtype = u.param.scalar_type();
  for (const Tensor* x : {&u.param, &u.grad, &u.exp_avg, &u.exp_avg_sq}) {
    if (!x->device().is_cpu()) return "it updates tensors on the CPU";
    if (const std::string reason = why_no_cpu_kernel(*x); !reason.empty()) return reason;
    if (x->scalar_type() != dtype) {
      return fmt::format("expected the parameter's dtype, {}, in its gradient and moments, got {}",
                         c10::toString(dtype), c10::toString(x->scalar_type()));
    }
    if (x != &u.grad && !x->is_contiguous()) return "it updates contiguous tensors";
  }
  return "";
}

longhaul_adam_w_parameter parameter_of(const AdamWUpdate& u, const Tensor& grad,
                                       const AdamWOptions& options) {
  return {.dtype = kernel_dtype(u.param),
          .n = u.param.numel(),
          .step = u.step,
          .weight_decay = u.decays ? options.weight_decay : 0.0,
          .param = u.param.data_ptr(),
          .grad = grad.const_data_ptr(),
          .exp_avg = u.exp_avg.data_ptr(),
          .exp_avg_sq = u.exp_avg_sq.data_ptr()};
}

}  // namespace

void adam_w(const std::vector<AdamWUpdate>& updates, const AdamWOptions& options) {
  check(options);
  for (const auto& update : updates) check(update);
  std::vector<longhaul_adam_w_parameter> parameters;
  std::vector<Tensor> gradients;  // kept until the kernel has run
  for (const auto& update : updates) {
    const std::string reason = why_no_kernel(update);
    if (reason.empty()) {
      gradients.push_back(update.grad.contiguous());
      parameters.push_back(parameter_of(update, gradients.back(), options));
    } else {
      report_fallback("adam_w", reason);
      adam_w_reference(update, options);
    }
  }
  run_kernel("adam_w", longhaul_adam_w,
             longhaul_adam_w_args{.count = static_cast<int64_t>(parameters.size()),
                                  .parameters = parameters.data(),
                                  .lr = options.lr,
                                  .beta1 = options.beta1,
                                  .beta2 = options.beta2,
                                  .eps = options.eps,
                                  .grad_scale = options.grad_scale});
}

}  // namespace longhaul::ops
