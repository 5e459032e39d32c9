// Writes the files of a plan: the half of a save that takes the time. Each byte is hashed and
// written once, while it is in the cache; files of a rank that has all contents at hand are written
// side by side, and ranks write theirs while the others' contents are put together. Called by
// save() and write_hf_folder().
#pragma once

#include "longhaul/checkpoint/manifest.h"
#include "longhaul/checkpoint/save_plan.h"

namespace longhaul::checkpoint {

// Where the contents of the tensors come from.
struct Contents {
  // Asked on the caller's thread, in the same order on all ranks.
  std::function<at::Tensor(const safetensors::TensorInfo& info)> of;
  // Each takes new memory, and where ranks write together `of` is a collective: asked one by one,
  // by all ranks for all tensors. Else all are at hand on the rank that writes them.
  bool fetched = false;
  // Where it is set, it is called before each round of turns, with the name of the tensor that each
  // rank writes (first) in it, empty if it writes none; `of` is then asked for this rank's.
  // Collective.
  std::function<void(const std::vector<std::string>& written)> gather = {};
  // What is written of them, of the planned dtype and shape; null: they themselves. Asked of the
  // rank that writes it alone.
  std::function<at::Tensor(const safetensors::TensorInfo& info, const at::Tensor& contents)>
      encode = {};
  // See plan_turns().
  SourceOf source = {};
};

struct ShardWriterOptions {
  fs::path folder;  // of a rank that has none to write it need not be there
  safetensors::Metadata metadata = {};
  // Fault points: <place>.tensor, <place>.shard.
  std::string fault_place;
  const dtensor::Communicator* ranks = nullptr;  // null: this one alone
  // Bytes of all tensors so far: this rank's when they are written, the others' when it was their
  // turn; told again when a file is synced. Where files are written side by side, by several
  // threads at once.
  std::function<void(int64_t bytes)> progress = {};
};

// Writes this rank's files, synced, and returns what there is to say of them: tensors and files.
// Takes the memory of one fetched tensor, or, where other ranks would have to wait for its writing,
// of two. After an error, which is thrown at the end, it goes on asking for contents if other ranks
// need its part in them.
Manifest write_shards(const std::vector<Shard>& shards, const Contents& contents,
                      const ShardWriterOptions& options);

}  // namespace longhaul::checkpoint
