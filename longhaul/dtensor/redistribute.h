// From one placement to another: the only place where a DTensor communicates.
#pragma once

#include "longhaul/dtensor/device_mesh.h"
#include "longhaul/dtensor/placement.h"

namespace longhaul::dtensor {

// `local` is this rank's part of a tensor of `global_sizes` in placements `from`; the result is its
// part in `to`. Collective. Outside autograd. Nothing is copied where nothing changes. Partial
// cannot be made out of anything else (Error).
Tensor redistribute_local(const Tensor& local, at::IntArrayRef global_sizes, const DeviceMesh& mesh,
                          const Placements& from, const Placements& to);

// What it costs along one axis of `ranks` ranks, in bytes that a rank sends, for a part-tensor of
// `bytes` in all; a local cut counts a thousandth of its bytes. Infinite for what cannot be had.
double redistribute_cost(int64_t bytes, int64_t ranks, const Placement& from, const Placement& to);

}  // namespace longhaul::dtensor
