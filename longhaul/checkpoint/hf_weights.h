// The weights of a Hugging Face folder as numbers, of FP8 with scales of blocks, too
// (fp8_blocks.h). Not a model: names are theirs. Called by train/.
#pragma once

#include <set>

#include "longhaul/checkpoint/hf_reader.h"

namespace longhaul::checkpoint {

class HfWeights {
 public:
  // UserError as HfReader's, for a tensor that is neither floating nor F8_E4M3, and where there are
  // F8_E4M3 tensors and config.json's quantization_config says another method or block size.
  explicit HfWeights(const fs::path& path);

  const fs::path& path() const { return reader_.path(); }
  // Sorted. The scales of quantized weights are not among them.
  std::vector<std::string> names() const;
  const std::vector<int64_t>& shape(const std::string& name) const;
  // Of what load() returns: fp32 for a quantized weight.
  at::ScalarType dtype(const std::string& name) const;
  const std::set<std::string>& quantized() const { return quantized_; }
  // What is wrong with a quantized weight's scales, which are read for it; empty: nothing.
  std::string problem(const std::string& name) const;
  // A new tensor. Takes the memory of its values.
  at::Tensor load(const std::string& name) const;
  // Rows first .. first + count - 1 (dim 0) of what load() returns; no others are read.
  at::Tensor load_rows(const std::string& name, int64_t first, int64_t count) const;
  // Whether two tensors hold the same values. Without memory for them if their types are equal.
  bool equal(const std::string& a, const std::string& b) const;

 private:
  HfReader reader_;
  std::set<std::string> quantized_;
};

}  // namespace longhaul::checkpoint
