// One step-N folder, opened and checked against its manifest; and the search for damage in it.
// Called by load(), find_resumable(), purge(), the Saver and the tools.
#pragma once

#include <functional>

#include "longhaul/checkpoint/manifest.h"
#include "longhaul/checkpoint/tensor_file.h"
#include "longhaul/checkpoint/tensor_source.h"
#include "longhaul/dtensor/communicator.h"

namespace longhaul::checkpoint {

using OpenFiles = std::map<std::string, safetensors::Reader>;

// The part of a folder's bytes that one of several readers compares with their checksums.
struct Share {
  int rank = 0, ranks = 1;
};

class CheckpointReader : public TensorSource {
 public:
  // Checks the manifest, the presence and size of every file, and that each header says of each
  // tensor what the manifest says. UserError with the first thing that is wrong.
  explicit CheckpointReader(const fs::path& step_folder);

  const fs::path& path() const override { return path_; }
  std::vector<std::string> names() const override;
  const safetensors::TensorInfo& info(const std::string& name) const override;
  at::Tensor load(const std::string& name) const override;
  at::Tensor load_rows(const std::string& name, int64_t first, int64_t count) const override;
  // The manifest's; nothing is read.
  std::string checksum(const std::string& name) const override { return entry(name).checksum; }

  const Manifest& manifest() const { return manifest_; }
  // Reads every byte. UserError with the first thing that does not match its checksum. `progress`
  // is called with every piece, by several threads at once.
  void verify(const Share& share = {}, const std::function<void()>& progress = {}) const;
  // All tensors, compared with their checksums as they are read. UserError as verify()'s.
  TensorMap load_verified() const;

 private:
  const TensorEntry& entry(const std::string& name) const;

  fs::path path_;
  Manifest manifest_;
  OpenFiles files_;
};

// Opens and verifies a folder, each rank a share of its bytes. Collective over `ranks` (null: this
// one alone): what is wrong on one, all throw as UserError.
void verify_together(const fs::path& step_folder, const dtensor::Communicator* ranks);

// What is wrong with the presence and sizes of the files, without opening them; empty: nothing.
std::vector<std::string> find_missing(const fs::path& step_folder, const Manifest& manifest);

// Everything that is wrong with a step folder, each as a line with file and tensor; empty: nothing.
std::vector<std::string> find_damage(const fs::path& step_folder);

}  // namespace longhaul::checkpoint
