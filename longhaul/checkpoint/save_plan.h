// Which file each tensor of a checkpoint goes to, which rank writes it, and when. Called by save(),
// stage(), write_hf_folder() and write_shards() only.
#pragma once

#include <vector>

#include "longhaul/checkpoint/checkpoint.h"

namespace longhaul::checkpoint {

// A file to be written.
struct Shard {
  std::string file;
  std::vector<safetensors::TensorInfo> tensors;  // in the order in which they are written
  int64_t bytes = 0;
  int writer = 0;  // rank of those that write together
};

// Of a tensor that has a shape but no place yet.
int64_t planned_bytes(const safetensors::TensorInfo& info);

// Cuts a sequence of tensors into files, without names, each of which is closed before it exceeds
// `max_bytes`; a larger tensor has one of its own.
std::vector<Shard> cut_into_shards(const std::vector<safetensors::TensorInfo>& tensors,
                                   int64_t max_bytes);

// The same on all ranks that save together: it depends on names, shapes and dtypes only. Shards are
// small enough for each rank to have one, and dealt round. Error for a tensor without contents on
// the only rank, unless the snapshot has them from elsewhere.
std::vector<Shard> plan_shards(const Snapshot& snapshot, const SaveOptions& options);

int64_t total_bytes(const std::vector<Shard>& shards);

// Tensors begin .. end - 1 of a shard.
struct Turn {
  size_t shard = 0, begin = 0, end = 0;
  int writer = 0;
  int lane = 0;      // of the writer's; the files of a lane are written one after another
  size_t round = 0;  // in each, every lane of every writer has at most one
};

// The order in which all tensors are written. Ranks take turns, and so do the `lanes` of each, so
// that each writes one tensor while the others' are got ready. Neighbours of the same `source` have
// one turn; null: each tensor has its own.
using SourceOf = std::function<const void*(const safetensors::TensorInfo&)>;
std::vector<Turn> plan_turns(const std::vector<Shard>& shards, int lanes, const SourceOf& source);

}  // namespace longhaul::checkpoint
