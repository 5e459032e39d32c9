#include <ATen/ATen.h>

#include "longhaul/ops/common.h"
#include "longhaul/ops/rms_norm/rms_norm.h"

namespace longhaul::ops {

Tensor rms_norm_reference(const Tensor& x, const Tensor& weight_D, double eps) {
  check_shape(weight_D, {x.size(-1)}, "rms_norm: weight");
  const Tensor wide = x.to(wide_type(x));
  const Tensor rstd = wide.square().mean(-1, /*keepdim=*/true).add(eps).rsqrt();
  return (wide * rstd).to(x.scalar_type()) * weight_D.to(x.scalar_type());
}

}  // namespace longhaul::ops
