// Ranks that are threads and save together, of one snapshot.
#pragma once

#include <numeric>

#include "tests/checkpoint/snapshots.h"
#include "tests/support/run_ranks.h"

namespace longhaul::checkpoint {

inline constexpr int kRanks = 4;

inline dtensor::Communicator all_of(dtensor::World& world, int timeout_ms = 30'000) {
  std::vector<int> ranks(world.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  return world.make_group("checkpoint", ranks, std::nullopt, std::chrono::milliseconds(timeout_ms));
}

// The same snapshot as the test's, of which only the first rank has the contents: every fetch is a
// broadcast.
inline Snapshot spread(const Snapshot& whole, const dtensor::Communicator& ranks) {
  Snapshot snapshot = whole;
  for (auto& [name, tensor] : snapshot.tensors) {
    tensor = at::empty(tensor.sizes(), tensor.options().device(at::kMeta));
  }
  snapshot.fetch = [&whole, &ranks](const std::string& name) {
    const at::Tensor& of = whole.tensors.at(name);
    at::Tensor tensor =
        ranks.rank() == 0 ? of.contiguous().clone() : at::zeros_like(of.contiguous());
    ranks.broadcast(tensor, 0).wait();
    return tensor;
  };
  return snapshot;
}

}  // namespace longhaul::checkpoint
