#include "longhaul/checkpoint/fp8_blocks.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>

#include "longhaul/base/error.h"

namespace longhaul::checkpoint {
namespace {

constexpr float kLargestFp8 = 448;
// The smallest normal fp32: below it a scale would have too few digits.
constexpr float kSmallestScale = std::numeric_limits<float>::min();
// With that scale such a magnitude is half of the smallest F8_E4M3, 2^-9, and rounds to zero.
constexpr float kRoundsToZero = kSmallestScale / 1024;

// Rows of the blocks in row `block` of the scales.
at::Tensor block_rows(const at::Tensor& weight_RC, int64_t block) {
  const int64_t first = block * kQuantizationBlock;
  return weight_RC.narrow(0, first, std::min(kQuantizationBlock, weight_RC.size(0) - first));
}

// A row of scales for each of the C columns.
at::Tensor for_columns(const at::Tensor& scales, int64_t C) {
  return scales.repeat_interleave(kQuantizationBlock).narrow(0, 0, C);
}

// Each block's largest magnitude, of blocks side by side.
at::Tensor largest_of_blocks(const at::Tensor& rows, int64_t blocks) {
  const at::Tensor largest_C = rows.to(at::kFloat).abs().amax(0);
  const int64_t padding = blocks * kQuantizationBlock - largest_C.size(0);
  return at::constant_pad_nd(largest_C, {0, padding}).view({blocks, kQuantizationBlock}).amax(1);
}

at::Tensor scales_of(const at::Tensor& largest) {
  // A tensor: a division by a number may be a product with its rounded inverse.
  const at::Tensor most = at::full_like(largest, kLargestFp8);
  // 448 times the scale is what a reader gets. As both are rounded, one in eight scales is not what
  // that would give again; once there and back, all are.
  const at::Tensor scales = largest.div(most).mul(most).div(most).clamp_min(kSmallestScale);
  return scales.masked_fill(largest <= kRoundsToZero, 1);
}

}  // namespace

nlohmann::json quantization_config() {
  return {{"quant_method", "fp8"},
          {"fmt", "e4m3"},
          {"activation_scheme", "dynamic"},
          {"weight_block_size", {kQuantizationBlock, kQuantizationBlock}}};
}

std::vector<int64_t> scales_shape(at::IntArrayRef sizes) {
  LONGHAUL_CHECK(sizes.size() == 2, "blocks of {} dims: they are a matrix's", sizes.size());
  return {ceil_div(sizes[0], kQuantizationBlock), ceil_div(sizes[1], kQuantizationBlock)};
}

at::Tensor block_scales(const at::Tensor& weight_RC) {
  const at::NoGradGuard no_grad;
  const auto shape = scales_shape(weight_RC.sizes());
  at::Tensor scales = at::empty(shape, weight_RC.options().dtype(at::kFloat));
  for (int64_t block = 0; block < shape[0]; ++block) {
    scales[block].copy_(scales_of(largest_of_blocks(block_rows(weight_RC, block), shape[1])));
  }
  return scales;
}

at::Tensor quantize(const at::Tensor& weight_RC, const at::Tensor& scales) {
  const at::NoGradGuard no_grad;
  at::Tensor result = at::empty(weight_RC.sizes(), weight_RC.options().dtype(at::kFloat8_e4m3fn));
  for (int64_t block = 0; block < scales.size(0); ++block) {
    const auto scale_C = for_columns(scales[block], weight_RC.size(1));
    const at::Tensor scaled = block_rows(weight_RC, block).to(at::kFloat).div(scale_C);
    block_rows(result, block).copy_(scaled.clamp(-kLargestFp8, kLargestFp8));
  }
  return result;
}

at::Tensor dequantize(const at::Tensor& weight_RC, const at::Tensor& scales, int64_t first_row) {
  const at::NoGradGuard no_grad;
  at::Tensor result = weight_RC.to(at::kFloat);
  const int64_t R = result.size(0), C = result.size(1);
  for (int64_t row = 0; row < R;) {
    const int64_t block = (first_row + row) / kQuantizationBlock;
    const int64_t end = std::min((block + 1) * kQuantizationBlock - first_row, R);
    result.narrow(0, row, end - row).mul_(for_columns(scales[block], C));
    row = end;
  }
  return result;
}

}  // namespace longhaul::checkpoint
