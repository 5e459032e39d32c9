// AdamW over all parameters. This file is compiled without contraction to fused multiply-adds, so
// that every instruction set gives the same bits.
#include "include/longhaul/kernels.h"
#include "longhaul/ops/cpu/kernel_table.h"
#include "longhaul/ops/cpu/pieces.h"

namespace longhaul::cpu::LONGHAUL_ISA {
namespace {

using Args = longhaul_adam_w_args;
using Parameter = longhaul_adam_w_parameter;

struct Coefficients {
  float keep, beta1, one_minus_beta1, beta2, one_minus_beta2, grad_scale, step_size, inv_sqrt2, eps;
};

Coefficients coefficients(const Args& a, const Parameter& p) {
  const auto step = static_cast<double>(p.step);
  const double correction1 = 1 - __builtin_pow(a.beta1, step);
  const double correction2 = 1 - __builtin_pow(a.beta2, step);
  return {static_cast<float>(1 - a.lr * p.weight_decay),
          static_cast<float>(a.beta1),
          static_cast<float>(1 - a.beta1),
          static_cast<float>(a.beta2),
          static_cast<float>(1 - a.beta2),
          static_cast<float>(a.grad_scale),
          static_cast<float>(a.lr / correction1),
          static_cast<float>(1 / __builtin_sqrt(correction2)),
          static_cast<float>(a.eps)};
}

void update(float* __restrict p, const float* __restrict grad, float* __restrict m,
            float* __restrict v, int64_t n, const Coefficients& c) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float g = grad[i] * c.grad_scale;
    m[i] = c.beta1 * m[i] + c.one_minus_beta1 * g;
    v[i] = c.beta2 * v[i] + c.one_minus_beta2 * g * g;
    p[i] = p[i] * c.keep - c.step_size * m[i] / (__builtin_sqrtf(v[i]) * c.inv_sqrt2 + c.eps);
  }
}

}  // namespace

void adam_w(const Args& a) {
  in_pieces(
      a.count, [&](int64_t i) { return a.parameters[i].n; },
      [&](int64_t i, int64_t from, int64_t n, int64_t) {
        const Parameter& p = a.parameters[i];
        update(p.param + from, p.grad + from, p.exp_avg + from, p.exp_avg_sq + from, n,
               coefficients(a, p));
      });
}

}  // namespace longhaul::cpu::LONGHAUL_ISA
