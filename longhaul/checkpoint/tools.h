// Looking at weights on disk: what is in them, how two of them differ, what is damaged. All take
// any path that open_source() takes. Return values, print nothing; cli/ prints.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "longhaul/checkpoint/tensor_source.h"

namespace longhaul::checkpoint {

struct ListedTensor {
  safetensors::TensorInfo info;
  std::string checksum;  // of the global contents; empty if not asked for
};

struct Listing {
  fs::path path;
  std::string format;  // "longhaul" or "safetensors"
  std::optional<int64_t> step;
  std::string kind;  // "full", "model_only", or empty
  std::vector<ListedTensor> tensors;
};

// Checksums of Hugging Face files are computed, which reads them; ours are in the manifest.
Listing show(const fs::path& path, bool checksums);
// A table, and the totals by kind (model, optimizer).
std::string to_text(const Listing& listing);
// {"path", "format", "step", "kind", "tensors": [{"name", "shape", "dtype", "checksum"}]}.
nlohmann::json to_json(const Listing& listing);

struct Tolerance {
  double relative = 0;
  double absolute = 0;
};

struct Difference {
  std::string name;
  std::string what;  // "only in A", "shape [2] in A, [3] in B", "7 of 12 values differ"
  // Of the values that differ: max |a - b| and max |a - b| / max(|a|, |b|). Values only.
  std::optional<double> max_absolute;
  std::optional<double> max_relative;
};

// By name. Two values differ when |a - b| > absolute + relative * |b|; NaN equals NaN. Holds one
// tensor of each side in memory.
std::vector<Difference> diff(const fs::path& a, const fs::path& b, const Tolerance& tolerance);

struct VerifyReport {
  fs::path path;  // what was looked at
  std::vector<std::string> problems;
  // False for Hugging Face files, which carry no checksums: only their form was checked.
  bool has_checksums = false;
};

VerifyReport verify(const fs::path& path);

}  // namespace longhaul::checkpoint
