// Writes a Hugging Face folder that is either complete or absent: it is prepared under a hidden
// name beside its own, synced, and renamed.
//
//   <folder>/model-00001-of-0000n.safetensors   tensors in the order in which they are given
//            model.safetensors.index.json       which tensor is in which of them
//            config.json, tokenizer.json, ...   texts
//
// Not a model: names, dtypes and texts are given. Called by train/.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "longhaul/base/safetensors.h"
#include "longhaul/checkpoint/tensor_file.h"
#include "longhaul/dtensor/communicator.h"

namespace longhaul::checkpoint {

// Tensors that are fetched together.
struct HfItem {
  std::string name;                              // what fetch() is asked for
  std::vector<safetensors::TensorInfo> tensors;  // name, dtype, shape
};

struct HfFolder {
  std::vector<HfItem> items;
  // The contents of an item's tensors, in their order and, but for `encode`, shapes and dtypes.
  // Asked in the same order by all ranks that write together (so it may be a collective), and again
  // for an item that is divided among files, or in one by the order of types.
  std::function<std::vector<at::Tensor>(const HfItem& item)> fetch;
  // Where it is set, fetch() is asked of the rank that writes the item alone, after this was called
  // with the name of the item that each rank writes next, empty if it writes none. Collective.
  std::function<void(const std::vector<std::string>& written)> gather = {};
  // What is written of such contents; null: they themselves. Asked of the rank that writes it, for
  // one tensor at a time.
  std::function<at::Tensor(const safetensors::TensorInfo& info, const at::Tensor& contents)>
      encode = {};
  // The other files by name; asked of the first rank, before anything is written.
  std::function<std::map<std::string, std::string>()> texts;
};

struct HfWriteOptions {
  // A file is closed before it exceeds this; a larger tensor gets a file of its own.
  int64_t max_shard_bytes = 5'000'000'000;
  // Files are made smaller to give each rank one, but not smaller than this for it.
  int64_t min_shard_bytes = 256'000'000;
  // What is at `folder` goes when the new one is complete; else it is an error.
  bool replace = false;
  // Whether what an interrupted write has left beside `folder` goes, by the name that it was for.
  // Null: only what was for the same name.
  std::function<bool(const std::string& name)> clears = {};
  // Ranks that write together, each a share of the files. Null: this one alone.
  const dtensor::Communicator* ranks = nullptr;
  std::function<void(int64_t bytes)> progress = {};  // as ShardWriterOptions'
};

// Bytes of all tensors.
int64_t total_bytes(const HfFolder& contents);

// Takes the memory of one item and of one encoded tensor, on ranks of two items: one is written
// while the next is put together; and what `gather` takes beside its result. On an error
// (UserError: disk, permissions) nothing new is under the final name; where ranks write together,
// all throw. Removes what earlier ones that died have left. A CollectiveError is as that of save().
// Fault points: hf_folder.tensor, .shard, .index, .rename.
void write_hf_folder(const fs::path& folder, const HfFolder& contents,
                     const HfWriteOptions& options = {});

}  // namespace longhaul::checkpoint
