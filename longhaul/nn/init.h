// Initial weights that do not depend on the layout: an element's value is a function of (seed,
// parameter name, global position of the element), so a shard can be filled alone and equals the
// same part of the whole.
#pragma once

#include <cstdint>

#include "longhaul/base/rng.h"
#include "longhaul/nn/module.h"

namespace longhaul::nn {

// Fills `shard`, which is `part` of a tensor, with std times the normals of `rng`. Values are
// computed in fp64 on the CPU and rounded to the shard's dtype. Nothing happens on the Meta device.
void fill_normal(Tensor& shard, const CounterRng& rng, double std, const Part& part);

// The part that a whole tensor is of itself.
Part whole(const Tensor& tensor);

// What `part`, of these sizes, is of a tensor that has the part's global sizes.
Tensor take_part(const Tensor& whole, const Part& part, at::IntArrayRef sizes);

// What the same `part` is of its own rows (dim 0) alone, which are offsets[0] .. + sizes[0] - 1.
Part within_rows(Part part, at::IntArrayRef sizes);

// The whole tensor.
void fill_normal(Tensor& tensor, const CounterRng& rng, double std);

}  // namespace longhaul::nn
