#include <ATen/ATen.h>

#include "longhaul/ops/common.h"
#include "longhaul/ops/rotary_mul/rotary_mul.h"

namespace longhaul::ops {
namespace {

// cos or sin [B, S, R/2] with as many 1-dimensions after S as x needs to broadcast.
Tensor broadcast_over_heads(Tensor angle, const Tensor& like) {
  angle = angle.to(wide_type(like));
  while (angle.dim() < like.dim()) angle = angle.unsqueeze(2);
  return angle;
}

}  // namespace

Tensor rotary_mul_reference(const Tensor& x, const Tensor& cos, const Tensor& sin,
                            RotaryMode mode) {
  const int64_t half = x.size(-1) / 2;
  const Tensor wide = x.to(wide_type(x));
  const Tensor c = broadcast_over_heads(cos, wide), s = broadcast_over_heads(sin, wide);
  auto pair_shape = x.sizes().vec();
  pair_shape.back() = half;
  const bool interleaved = mode == RotaryMode::kInterleaved;
  pair_shape.insert(interleaved ? pair_shape.end() : pair_shape.end() - 1, 2);
  const int64_t pair_dim = interleaved ? -1 : -2;
  const Tensor pairs = wide.reshape(pair_shape);
  const Tensor a = pairs.select(pair_dim, 0), b = pairs.select(pair_dim, 1);
  const Tensor turned = at::stack({a * c - b * s, b * c + a * s}, pair_dim);
  return turned.reshape(x.sizes()).to(x.scalar_type());
}

}  // namespace longhaul::ops
