// Weights in Hugging Face's layout: a folder with model.safetensors, or with
// model.safetensors.index.json and its shards, or one .safetensors file. Tensors are read one at a
// time. Not a model: names and dtypes are theirs; models/ translates them.
#pragma once

#include <optional>

#include "longhaul/checkpoint/tensor_source.h"

namespace longhaul::checkpoint {

class HfReader : public TensorSource {
 public:
  // Maps every file and checks every header. UserError if a shard is missing or damaged, or lacks a
  // tensor that the index promises. A warning names tensors that the index does not: they count as
  // not there.
  explicit HfReader(const fs::path& path);

  const fs::path& path() const override { return path_; }
  std::vector<std::string> names() const override;
  bool contains(const std::string& name) const { return place_.contains(name); }
  const safetensors::TensorInfo& info(const std::string& name) const override;
  at::Tensor load(const std::string& name) const override;
  at::Tensor load_rows(const std::string& name, int64_t first, int64_t count) const override;
  std::string checksum(const std::string& name) const override;

  const std::vector<safetensors::Reader>& files() const { return files_; }

 private:
  void open_index(const fs::path& index);
  const safetensors::Reader& file_of(const std::string& name) const;

  fs::path path_;
  std::vector<safetensors::Reader> files_;
  std::map<std::string, size_t> place_;  // tensor to file
};

}  // namespace longhaul::checkpoint
