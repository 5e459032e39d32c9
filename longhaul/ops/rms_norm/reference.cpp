#include <ATen/ATen.h>

#include "longhaul/ops/common.h"
#include "longhaul/ops/rms_norm/rms_norm.h"

namespace longhaul::ops {
namespace {

// [..., 1].
Tensor rstd_of(const Tensor& wide, double eps) {
  return wide.square().mean(-1, /*keepdim=*/true).add(eps).rsqrt();
}

}  // namespace

Tensor rms_norm_reference(const Tensor& x, const Tensor& weight_D, double eps) {
  check_shape(weight_D, {x.size(-1)}, "rms_norm: weight");
  const Tensor wide = x.to(wide_type(x));
  return (wide * rstd_of(wide, eps)).to(x.scalar_type()) * weight_D.to(x.scalar_type());
}

NormForward rms_norm_forward_reference(const Tensor& x, const Tensor& residual,
                                       const Tensor& weight_D, double eps) {
  const Tensor sum = residual.defined() ? x + residual : Tensor();
  const Tensor& of = residual.defined() ? sum : x;
  return {rms_norm_reference(of, weight_D, eps), sum, rstd_of(of.to(wide_type(of)), eps).flatten()};
}

NormGradients rms_norm_grad_reference(const Tensor& dy, const Tensor& x, const Tensor& weight_D,
                                      const Tensor& rstd, const Tensor& d_sum) {
  const auto wide = wide_type(x);
  const int64_t D = x.size(-1);
  const Tensor x_RD = x.to(wide).reshape({-1, D}), r = rstd.to(wide).reshape({-1, 1});
  const Tensor dy_RD = dy.to(wide).reshape({-1, D}), g = dy_RD * weight_D.to(wide);
  Tensor d_x = r * (g - x_RD * r.square() * (g * x_RD).mean(-1, /*keepdim=*/true));
  if (d_sum.defined()) d_x = d_x + d_sum.to(wide).reshape({-1, D});
  return {d_x.view(x.sizes()).to(x.scalar_type()),
          (dy_RD * x_RD * r).sum(0).to(weight_D.scalar_type())};
}

}  // namespace longhaul::ops
