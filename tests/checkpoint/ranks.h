// Ranks that are threads and save together, of one snapshot.
#pragma once

#include <numeric>

#include "longhaul/dtensor/placement.h"
#include "tests/checkpoint/snapshots.h"
#include "tests/support/run_ranks.h"

namespace longhaul::checkpoint {

inline constexpr int kRanks = 4;

inline dtensor::Communicator all_of(dtensor::World& world, int timeout_ms = 30'000) {
  std::vector<int> ranks(world.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  return world.make_group("checkpoint", ranks, std::nullopt, std::chrono::milliseconds(timeout_ms));
}

// The same snapshot as the test's, of which each rank holds parts: rows, columns, rows that two
// neighbours share, or, of a scalar, the whole.
inline Snapshot spread(const Snapshot& whole, const dtensor::Communicator& ranks) {
  Snapshot snapshot = whole;
  int number = 0;
  for (auto& [name, tensor] : snapshot.tensors) {
    TensorPart part{tensor.clone(), std::vector<int64_t>(static_cast<size_t>(tensor.dim()), 0)};
    if (tensor.dim() > 0) {
      const bool shared = number % 3 == 2;
      const int pieces = shared ? ceil_div(ranks.size(), 2) : ranks.size();
      const int64_t dim = number % 3 == 1 ? tensor.dim() - 1 : 0;
      const auto own =
          dtensor::slice_of(tensor.size(dim), pieces, shared ? ranks.rank() / 2 : ranks.rank());
      part.tensor = tensor.narrow(dim, own.start, own.length).clone();
      part.offsets[static_cast<size_t>(dim)] = own.start;
    }
    tensor = at::empty(tensor.sizes(), tensor.options().device(at::kMeta));
    snapshot.parts[name] = std::move(part);
    ++number;
  }
  return snapshot;
}

// The same, of which only the first rank has the contents: every fetch is a broadcast.
inline Snapshot fetched(const Snapshot& whole, const dtensor::Communicator& ranks) {
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
