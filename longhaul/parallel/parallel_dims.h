// The ranks of a job as a mesh, and the groups of ranks that its parts talk in. Made once, at the
// start, and handed down; knows no model and no data.
#pragma once

#include <memory>

#include "longhaul/config/degrees.h"
#include "longhaul/dtensor/device_mesh.h"
#include "longhaul/dtensor/world.h"

namespace longhaul::parallel {

using Group = std::shared_ptr<const dtensor::Communicator>;

struct ParallelDims {
  // Collective over all ranks of `world`. UserError if the job's degrees do not fit them, before
  // any group is made.
  static ParallelDims make(const JobConfig& config, dtensor::World& world);

  Degrees degrees;
  // pp (1 until there are stages) x dp_replicate x dp_shard x cp x tp; the last varies fastest with
  // the rank.
  dtensor::Mesh mesh;

  dtensor::Mesh tp;  // of its axis tp alone, on which tensor parallelism cuts

  // Flattened axes of it.
  Group all;   // every rank
  Group dp;    // dp_replicate x dp_shard: the ranks that read different rows
  Group fsdp;  // dp_shard x cp: the ranks that share what tp cuts
  Group loss;  // dp_replicate x dp_shard x cp: the ranks whose losses and counts add up
  // dp_shard x cp x tp: the ranks of a copy, which share what tp does not cut; each routes other
  // tokens.
  Group tokens;
  Group efsdp;  // of dp_shard x cp x tp = efsdp x ep the ranks that share the same experts,
  Group ep;     // and those that have different ones; ep varies fastest

  // The copies of the (sharded) parameters.
  const dtensor::Communicator& replicate() const { return mesh->axis("dp_replicate"); }

  int64_t data_rank() const { return dp->rank(); }
  int64_t data_size() const { return dp->size(); }
  bool is_first() const { return all->rank() == 0; }  // the rank that talks and writes
};

}  // namespace longhaul::parallel
