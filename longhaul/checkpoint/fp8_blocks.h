// FP8 weights as DeepSeek publishes them (README_WEIGHTS.md and fp8_cast_bf16.py of the DeepSeek-V3
// repository): `<name>` F8_E4M3 [R, C] and `<name>_scale_inv` F32 [ceil(R / 128), ceil(C / 128)]
// mean
//
//   <name>[i, j] * <name>_scale_inv[i / 128, j / 128]
//
// The last blocks may be ragged. Not files, and not which weights are FP8: HfWeights reads them,
// export_hf() writes them.
#pragma once

#include <ATen/ATen.h>

#include <nlohmann/json_fwd.hpp>
#include <vector>

namespace longhaul::checkpoint {

// Rows and columns of a block that shares a scale.
inline constexpr int64_t kQuantizationBlock = 128;
// What the name of a weight's scales has after the weight's.
inline constexpr const char* kScaleSuffix = "_scale_inv";

// quantization_config of a config.json that such weights belong to.
nlohmann::json quantization_config();

// [ceil(R / 128), ceil(C / 128)] of [R, C].
std::vector<int64_t> scales_shape(at::IntArrayRef sizes);

// The scales, F32, by which each block's largest magnitude becomes 448, the largest of F8_E4M3; of
// a block of zeros it is 1, and none is below 2^-126. Of a block with values that are not finite in
// fp32 it is not finite. The scales of what was quantized with them are the same bits. Takes the
// memory of 128 rows.
at::Tensor block_scales(const at::Tensor& weight_RC);

// `weight_RC`, finite in fp32, over its scales as F8_E4M3 [R, C]: to nearest, ties to even, and
// what would be above 448 is 448. Takes the memory of the result and of 128 rows.
at::Tensor quantize(const at::Tensor& weight_RC, const at::Tensor& scales);

// F8_E4M3 [R, C] times its scales, in fp32. `first_row` is the place of the first row in its block,
// where the rows are part of more.
at::Tensor dequantize(const at::Tensor& weight_RC, const at::Tensor& scales, int64_t first_row = 0);

}  // namespace longhaul::checkpoint
