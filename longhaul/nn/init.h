// Initial weights that do not depend on the layout: an element's value is a function of (seed,
// parameter name, global position of the element), so a shard can be filled alone and equals the
// same part of the whole.
#pragma once

#include <cstdint>

#include "longhaul/base/rng.h"
#include "longhaul/nn/module.h"

namespace longhaul::nn {

// Fills `shard` with std times the normals of `rng`. The shard stands at `offsets` in a tensor of
// `global_sizes`. Values are computed in fp64 on the CPU and rounded to the shard's dtype. Nothing
// happens on the Meta device.
void fill_normal(Tensor& shard, const CounterRng& rng, double std, at::IntArrayRef global_sizes,
                 at::IntArrayRef offsets);

// The whole tensor.
void fill_normal(Tensor& tensor, const CounterRng& rng, double std);

}  // namespace longhaul::nn
