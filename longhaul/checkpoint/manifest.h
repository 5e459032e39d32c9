// manifest.json: what a checkpoint folder vouches for. Written last; a file or tensor that it does
// not name is not part of the checkpoint. Its own checksum covers everything else in it. Reading it
// checks it against itself, not against the files: that is checkpoint_reader's part.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "longhaul/base/safetensors.h"

namespace longhaul::checkpoint {

inline constexpr const char* kManifestName = "manifest.json";

// Bytes begin .. end - 1 of a file.
struct Extent {
  std::string file;
  int64_t begin = 0;
  int64_t end = 0;
};

struct TensorEntry {
  safetensors::DType dtype = safetensors::DType::kF32;
  std::vector<int64_t> shape;  // global
  std::string checksum;        // XXH3-128 of the global contents, row-major
  Extent extent;               // one shard holds the whole tensor
};

// Tensors lie in a file without gaps and have their own checksums, so that of the file is only for
// what is before them; in format 1 it was for the whole file.
struct FileEntry {
  int64_t bytes = 0;
  int64_t header_bytes = 0;  // how many of its first bytes the checksum is for
  std::string checksum;
};

struct Manifest {
  int64_t step = 0;
  bool model_only = false;
  std::map<std::string, TensorEntry> tensors;
  std::map<std::string, FileEntry> files;
  nlohmann::json trainer = nlohmann::json::object();
};

// "full" or "model_only".
const char* kind_name(bool model_only);

// The text of manifest.json. UserError if `trainer` holds text that is not UTF-8.
std::string encode_manifest(const Manifest& manifest);

// And back. UserError, with `where` in front, if it is damaged or of a newer format.
Manifest decode_manifest(std::string_view text, const std::string& where);

// UserError, with path and reason, if it is missing, damaged or of a newer format.
Manifest read_manifest(const fs::path& step_folder);

// Why a folder with this manifest is not what the name step-<step> says, such as a copy; empty: it
// is.
std::string misnamed(const Manifest& manifest, int64_t step);

}  // namespace longhaul::checkpoint
