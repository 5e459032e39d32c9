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

bool is_fp32_on_cpu(const Tensor& x) {
  return x.device().is_cpu() && x.scalar_type() == at::kFloat;
}

// What is changed must be where it is; a gradient may be copied.
bool kernel_applies(const AdamWUpdate& u) {
  for (const Tensor* x : {&u.param, &u.exp_avg, &u.exp_avg_sq}) {
    if (!is_fp32_on_cpu(*x) || !x->is_contiguous()) return false;
  }
  return is_fp32_on_cpu(u.grad);
}

longhaul_adam_w_parameter parameter_of(const AdamWUpdate& u, const Tensor& grad,
                                       const AdamWOptions& options) {
  return {.n = u.param.numel(),
          .step = u.step,
          .weight_decay = u.decays ? options.weight_decay : 0.0,
          .param = u.param.data_ptr<float>(),
          .grad = grad.const_data_ptr<float>(),
          .exp_avg = u.exp_avg.data_ptr<float>(),
          .exp_avg_sq = u.exp_avg_sq.data_ptr<float>()};
}

}  // namespace

void adam_w(const std::vector<AdamWUpdate>& updates, const AdamWOptions& options) {
  for (const auto& update : updates) check(update);
  std::vector<longhaul_adam_w_parameter> parameters;
  std::vector<Tensor> gradients;  // kept until the kernel has run
  for (const auto& update : updates) {
    if (kernel_applies(update)) {
      gradients.push_back(update.grad.contiguous());
      parameters.push_back(parameter_of(update, gradients.back(), options));
    } else {
      report_fallback("adam_w", "it updates contiguous fp32 on the CPU");
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
