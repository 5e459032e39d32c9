// The weights of a Hugging Face folder as numbers. FP8 weights as DeepSeek publishes them come with
// scales of blocks (fp8_cast_bf16.py of the DeepSeek-V3 repository): `<name>` F8_E4M3 [R, C] and
// `<name>_scale_inv` F32 [ceil(R / 128), ceil(C / 128)] mean
//
//   <name>[i, j] * <name>_scale_inv[i / 128, j / 128]
//
// Not a model: names are theirs. Called by train/.
#pragma once

#include <set>

#include "longhaul/checkpoint/hf_reader.h"

namespace longhaul::checkpoint {

// Rows and columns of a block that shares a scale.
inline constexpr int64_t kQuantizationBlock = 128;

// F8_E4M3 [R, C] times its scales, in fp32. The last blocks may be ragged. `first_row` is the place
// of the first row in its block, where the rows are part of more.
at::Tensor dequantize(const at::Tensor& weight_RC, const at::Tensor& scales, int64_t first_row = 0);

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
