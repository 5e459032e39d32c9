// How many collectives of each kind a rank took part in.
#pragma once

#include <map>

#include "longhaul/dtensor/world.h"

namespace longhaul::testing {

using Counts = std::map<dtensor::CollectiveKind, int64_t>;

// On a mesh axis, since its log was cleared; kinds that did not occur are 0.
inline Counts counts_on(const dtensor::World& world, const char* axis) {
  using Kind = dtensor::CollectiveKind;
  Counts counts;
  for (const Kind kind : {Kind::kAllGather, Kind::kReduceScatter, Kind::kAllReduce, Kind::kAllToAll,
                          Kind::kBroadcast, Kind::kBarrier}) {
    counts[kind] = world.log().total(kind, axis).count;
  }
  return counts;
}

}  // namespace longhaul::testing
