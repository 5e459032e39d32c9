// Named tensors on disk, read one at a time: our checkpoints (CheckpointReader) and Hugging Face
// folders or single files (HfReader). Called by the tools and by whoever imports weights.
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <string>
#include <vector>

#include "longhaul/base/safetensors.h"

namespace longhaul::checkpoint {

class TensorSource {
 public:
  virtual ~TensorSource() = default;

  // The step folder, Hugging Face folder or file that is read.
  virtual const fs::path& path() const = 0;
  // Sorted.
  virtual std::vector<std::string> names() const = 0;
  // Global shape and dtype. UserError, with the nearest name, if there is none.
  virtual const safetensors::TensorInfo& info(const std::string& name) const = 0;
  // A new CPU tensor. UserError if there is none.
  virtual at::Tensor load(const std::string& name) const = 0;
  // A new CPU tensor with rows first .. first + count - 1 (dim 0); no others are read.
  virtual at::Tensor load_rows(const std::string& name, int64_t first, int64_t count) const = 0;
  // XXH3-128 of the global contents.
  virtual std::string checksum(const std::string& name) const = 0;
};

// Opens whatever lies at `path`: a step-N folder, a folder with step-N folders (the newest, see
// locate()), a Hugging Face folder, or a .safetensors file. UserError if it is none of these or its
// files are incomplete.
std::unique_ptr<TensorSource> open_source(const fs::path& path);

}  // namespace longhaul::checkpoint
