// From one placement to another: the only place where a DTensor communicates.
#pragma once

#include "longhaul/dtensor/device_mesh.h"
#include "longhaul/dtensor/placement.h"

namespace longhaul::dtensor {

// `local` is this rank's part of a tensor of `global_sizes` in placements `from`; the result is its
// part in `to`. Collective. Outside autograd. Nothing is copied where nothing changes. Where the
// axes' steps may come in any order, those that make the part smaller come first and those that
// make it larger last, so that slow axes move little. Partial cannot be made out of anything else
// (Error).
Tensor redistribute_local(const Tensor& local, at::IntArrayRef global_sizes, const DeviceMesh& mesh,
                          const Placements& from, const Placements& to);

// The name of the first collective of that way ("all_gather", a savable operator); nullptr: none,
// parts are cut out.
const char* first_collective(const DeviceMesh& mesh, const Placements& from, const Placements& to);

// What it costs along one axis of `ranks` ranks over `link`, in microseconds, for a tensor of
// `bytes` over these ranks; a local cut counts a thousandth of its bytes, within the host. Infinite
// for what cannot be had.
double redistribute_cost(int64_t bytes, int64_t ranks, const Link& link, const Placement& from,
                         const Placement& to);

}  // namespace longhaul::dtensor
