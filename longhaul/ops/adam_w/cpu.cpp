#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <cmath>

#include "longhaul/base/error.h"
#include "longhaul/ops/adam_w/adam_w.h"
#include "longhaul/ops/common.h"

namespace longhaul::ops {
namespace {

constexpr int64_t kGrain = 1 << 15;

template <typename T>
struct Coefficients {
  T keep, beta1, one_minus_beta1, beta2, one_minus_beta2, grad_scale, step_size, inv_sqrt2, eps;
};

template <typename T>
Coefficients<T> coefficients(int64_t step, const AdamWOptions& o) {
  const double correction1 = 1 - std::pow(o.beta1, step);
  const double correction2 = 1 - std::pow(o.beta2, step);
  return {T(1 - o.lr * o.weight_decay),
          T(o.beta1),
          T(1 - o.beta1),
          T(o.beta2),
          T(1 - o.beta2),
          T(o.grad_scale),
          T(o.lr / correction1),
          T(1 / std::sqrt(correction2)),
          T(o.eps)};
}

template <typename T>
void update(T* __restrict p, const T* __restrict grad, T* __restrict m, T* __restrict v, int64_t n,
            const Coefficients<T>& c) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const T g = grad[i] * c.grad_scale;
    m[i] = c.beta1 * m[i] + c.one_minus_beta1 * g;
    v[i] = c.beta2 * v[i] + c.one_minus_beta2 * g * g;
    p[i] = p[i] * c.keep - c.step_size * m[i] / (std::sqrt(v[i]) * c.inv_sqrt2 + c.eps);
  }
}

template <typename T>
void adam_w_cpu(at::Tensor& param, const at::Tensor& grad, at::Tensor& exp_avg,
                at::Tensor& exp_avg_sq, const Coefficients<T>& c) {
  T *p = param.data_ptr<T>(), *m = exp_avg.data_ptr<T>(), *v = exp_avg_sq.data_ptr<T>();
  const T* g = grad.const_data_ptr<T>();
  at::parallel_for(0, param.numel(), kGrain, [&](int64_t begin, int64_t end) {
    update(p + begin, g + begin, m + begin, v + begin, end - begin, c);
  });
}

bool fits(const at::Tensor& param, const at::Tensor& x) {
  return x.is_contiguous() && x.device().is_cpu() && x.scalar_type() == param.scalar_type();
}

}  // namespace

void adam_w(at::Tensor& param, const at::Tensor& grad, at::Tensor& exp_avg, at::Tensor& exp_avg_sq,
            int64_t step, const AdamWOptions& options) {
  LONGHAUL_CHECK(step >= 1, "adam_w: step {}, must be at least 1", step);
  check_shape(grad, param.sizes(), "adam_w: grad");
  check_shape(exp_avg, param.sizes(), "adam_w: exp_avg");
  check_shape(exp_avg_sq, param.sizes(), "adam_w: exp_avg_sq");
  const bool contiguous =
      fits(param, param) && fits(param, grad) && fits(param, exp_avg) && fits(param, exp_avg_sq);
  if (contiguous && param.scalar_type() == at::kFloat) {
    adam_w_cpu<float>(param, grad, exp_avg, exp_avg_sq, coefficients<float>(step, options));
  } else if (contiguous && param.scalar_type() == at::kDouble) {
    adam_w_cpu<double>(param, grad, exp_avg, exp_avg_sq, coefficients<double>(step, options));
  } else {
    adam_w_reference(param, grad, exp_avg, exp_avg_sq, step, options);
  }
}

}  // namespace longhaul::ops
