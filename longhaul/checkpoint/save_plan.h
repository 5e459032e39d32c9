// Which file each tensor of a checkpoint goes to, and which rank writes it. Called by save() and
// stage() only.
#pragma once

#include <vector>

#include "longhaul/checkpoint/checkpoint.h"

namespace longhaul::checkpoint {

// A file to be written.
struct Shard {
  std::string file;
  std::vector<safetensors::TensorInfo> tensors;  // in the order in which they are written
  int64_t bytes = 0;
  int writer = 0;  // rank of SaveOptions::ranks
};

// The same on all ranks that save together: it depends on names, shapes and dtypes only. Shards are
// small enough for each rank to have one, and dealt round. With `shapes_only` the tensors need no
// contents.
std::vector<Shard> plan_shards(const TensorMap& tensors, bool shapes_only,
                               const SaveOptions& options);

int64_t total_bytes(const std::vector<Shard>& shards);

}  // namespace longhaul::checkpoint
