// Operators that treat rows alone: norms, rotation, SwiGLU, look-ups. Any dim but the last may be
// cut.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "longhaul/dtensor/operators/placing.h"
#include "longhaul/ops/rms_norm/rms_norm.h"
#include "longhaul/ops/rotary_mul/rotary_mul.h"
#include "longhaul/ops/swiglu/swiglu.h"

namespace longhaul::dtensor {
namespace {

Placement cut(int64_t dim) { return Placement::shard(dim); }

// Whether x lies in slices of a dim before the last.
bool in_rows(const Placement& placement, const Tensor& x) {
  return placement.is_shard() && placement.dim() < x.dim() - 1;
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps, int64_t kernel) {
  Placing placing("rms_norm", mesh_of({&x, &weight}), {x, weight}, {x.sizes().vec()});
  for (size_t axis = 0; axis < placing.num_axes(); ++axis) {
    const Placement now = placement_of(x, axis);
    if (in_rows(now, x)) {
      placing.share({now, Placement::replicate()}, {now});
    } else {
      placing.replicate();
    }
  }
  return placing.compute([&](const std::vector<Tensor>& parts) {
    return std::vector{ops::rms_norm(parts[0], parts[1], eps, kernel_of(kernel))};
  })[0];
}

std::tuple<Tensor, Tensor> rms_norm_add(const Tensor& x, const Tensor& residual,
                                        const Tensor& weight, double eps, int64_t kernel) {
  Placing placing("rms_norm_add", mesh_of({&x, &residual, &weight}), {x, residual, weight},
                  {x.sizes().vec(), x.sizes().vec()});
  for (size_t axis = 0; axis < placing.num_axes(); ++axis) {
    // Terms of x are best added up in the slices that the residual lies in.
    const Placement of_x = placement_of(x, axis), of_residual = placement_of(residual, axis);
    const Placement now = in_rows(of_x, x) ? of_x : of_residual;
    if (in_rows(now, x)) {
      placing.share({now, now, Placement::replicate()}, {now, now});
    } else {
      placing.replicate();
    }
  }
  const auto results = placing.compute([&](const std::vector<Tensor>& parts) {
    const auto [y, sum] = ops::rms_norm_add(parts[0], parts[1], parts[2], eps, kernel_of(kernel));
    return std::vector{y, sum};
  });
  return {results[0], results[1]};
}

// cos and sin [B, S, R / 2] have the first two dims of x.
Tensor rotary_mul(const Tensor& x, const Tensor& cos, const Tensor& sin, int64_t mode,
                  int64_t kernel) {
  Placing placing("rotary_mul", mesh_of({&x, &cos, &sin}), {x, cos, sin}, {x.sizes().vec()});
  for (size_t axis = 0; axis < placing.num_axes(); ++axis) {
    const Placement now = placement_of(x, axis);
    if (in_rows(now, x)) {
      const Placement table = now.dim() < 2 ? now : Placement::replicate();
      placing.share({now, table, table}, {now});
    } else {
      placing.replicate();
    }
  }
  return placing.compute([&](const std::vector<Tensor>& parts) {
    return std::vector{ops::rotary_mul(parts[0], parts[1], parts[2],
                                       static_cast<ops::RotaryMode>(mode), kernel_of(kernel))};
  })[0];
}

// Elementwise: any dim may be cut.
Tensor swiglu(const Tensor& gate, const Tensor& up, int64_t kernel) {
  Placing placing("swiglu", mesh_of({&gate, &up}), {gate, up}, {gate.sizes().vec()});
  for (size_t axis = 0; axis < placing.num_axes(); ++axis) {
    const Placement of_gate = placement_of(gate, axis), of_up = placement_of(up, axis);
    const Placement now = of_gate.is_shard() ? of_gate : of_up;
    if (now.is_shard()) {
      placing.share({now, now}, {now});
    } else {
      placing.replicate();
    }
  }
  return placing.compute([&](const std::vector<Tensor>& parts) {
    return std::vector{ops::swiglu(parts[0], parts[1], kernel_of(kernel))};
  })[0];
}

// Rows of a table of which each rank has a slice: a rank looks up the ids that it has and gives
// zeros for the others, so the results are terms.
Tensor look_up_slice(const Tensor& rows, const Tensor& ids, int64_t start) {
  const int64_t count = rows.size(0);
  const Tensor foreign = (ids < start).logical_or_(ids >= start + count);
  if (count == 0) {
    auto sizes = ids.sizes().vec();
    sizes.push_back(rows.size(1));
    return at::zeros(sizes, rows.options()) + rows.sum();
  }
  return at::embedding(rows, (ids - start).masked_fill_(foreign, 0))
      .masked_fill(foreign.unsqueeze(-1), 0);
}

Tensor embedding(const Tensor& weight, const Tensor& ids) {
  auto sizes = ids.sizes().vec();
  sizes.push_back(weight.size(1));
  Placing placing("embedding", mesh_of({&weight, &ids}), {weight, ids}, {sizes});
  for (size_t axis = 0; axis < placing.num_axes(); ++axis) {
    const Placement of_ids = placement_of(ids, axis), of_weight = placement_of(weight, axis);
    if (of_weight.is_shard(0)) {
      placing.share({cut(0), Placement::replicate()}, {Placement::partial()});
    } else if (of_weight.is_shard(1)) {
      placing.share({cut(1), Placement::replicate()}, {cut(ids.dim())});
    } else if (of_ids.is_shard()) {
      placing.share({Placement::replicate(), of_ids}, {of_ids});
    } else {
      placing.replicate();
    }
  }
  const int64_t start = placing.box_of_input(0).offsets[0];
  const bool whole = placing.box_of_input(0).sizes[0] == weight.size(0);
  return placing.compute([&](const std::vector<Tensor>& parts) {
    return std::vector{whole ? at::embedding(parts[0], parts[1])
                             : look_up_slice(parts[0], parts[1], start)};
  })[0];
}

TORCH_LIBRARY_IMPL(longhaul_model, AutogradPrivateUse2, m) {
  m.impl("rms_norm", rms_norm);
  m.impl("rms_norm_add", rms_norm_add);
  m.impl("rotary_mul", rotary_mul);
  m.impl("swiglu", swiglu);
  m.impl("embedding", embedding);
}

}  // namespace
}  // namespace longhaul::dtensor

// What the linker is told to keep.
extern "C" void longhaul_dtensor_rows() {}
