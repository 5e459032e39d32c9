#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cmath>

#include "longhaul/ops/adam_w/adam_w.h"

namespace longhaul::ops {

void adam_w_reference(const AdamWUpdate& update, const AdamWOptions& options) {
  const at::NoGradGuard no_grad;
  const auto& [param, grad, exp_avg, exp_avg_sq, step, decays] = update;
  const at::Tensor g = options.grad_scale == 1.0 ? grad : grad * options.grad_scale;
  const double correction1 = 1 - std::pow(options.beta1, step);
  const double correction2 = 1 - std::pow(options.beta2, step);
  if (decays) param.mul_(1 - options.lr * options.weight_decay);
  exp_avg.mul_(options.beta1).add_(g, 1 - options.beta1);
  exp_avg_sq.mul_(options.beta2).addcmul_(g, g, 1 - options.beta2);
  const at::Tensor denominator = exp_avg_sq.sqrt().div_(std::sqrt(correction2)).add_(options.eps);
  param.addcdiv_(exp_avg, denominator, -options.lr / correction1);
}

}  // namespace longhaul::ops
