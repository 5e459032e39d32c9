// AdamW over all parameters, in fp32 whatever they are stored in. This file is compiled without
// contraction to fused multiply-adds, so that every instruction set gives the same bits.
#include "include/longhaul/kernels.h"
#include "longhaul/ops/cpu/dtype.h"
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

LONGHAUL_INLINE float widened(float x) { return x; }
LONGHAUL_INLINE float widened(bf16 x) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(x.bits) << 16);
}

// To nearest even, by integers: the processor's own conversion to bf16 takes denormals for 0.
template <typename T>
LONGHAUL_INLINE T rounded(float x) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return x;
  } else {
    const auto bits = __builtin_bit_cast(uint32_t, x);
    const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
    const uint32_t up = bits + 0x7fff + (bits >> 16 & 1);
    return {static_cast<uint16_t>((is_nan ? bits | 0x400000 : up) >> 16)};
  }
}

template <typename T>
void update(T* __restrict p, const T* __restrict grad, T* __restrict m, T* __restrict v, int64_t n,
            const Coefficients& c) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float g = widened(grad[i]) * c.grad_scale;
    m[i] = rounded<T>(c.beta1 * widened(m[i]) + c.one_minus_beta1 * g);
    v[i] = rounded<T>(c.beta2 * widened(v[i]) + c.one_minus_beta2 * g * g);
    const float root = __builtin_sqrtf(widened(v[i])) * c.inv_sqrt2;
    p[i] = rounded<T>(widened(p[i]) * c.keep - c.step_size * widened(m[i]) / (root + c.eps));
  }
}

template <typename T>
void update_piece(const Parameter& p, int64_t from, int64_t n, const Coefficients& c) {
  const auto piece = [&](void* array) { return static_cast<T*>(array) + from; };
  update(piece(p.param), static_cast<const T*>(p.grad) + from, piece(p.exp_avg),
         piece(p.exp_avg_sq), n, c);
}

}  // namespace

void adam_w(const Args& a) {
  in_pieces(
      a.count, [&](int64_t i) { return a.parameters[i].n; },
      [&](int64_t i, int64_t from, int64_t n, int64_t) {
        const Parameter& p = a.parameters[i];
        with_dtype(p.dtype, [&]<typename T>() { update_piece<T>(p, from, n, coefficients(a, p)); });
      });
}

}  // namespace longhaul::cpu::LONGHAUL_ISA
