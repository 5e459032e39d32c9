// FP8 weights with scales of 128 x 128 blocks, made and read by plain loops.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <utility>

#include "tests/support/tensors.h"

namespace longhaul::testing {

// {F8_E4M3 [R, C], scales F32 [ceil(R / 128), ceil(C / 128)]}: each block's largest value becomes
// 448, the largest of F8_E4M3.
inline std::pair<at::Tensor, at::Tensor> quantized(const at::Tensor& matrix) {
  const at::Tensor x = matrix.to(at::kFloat).contiguous();
  const int64_t R = x.size(0), C = x.size(1);
  at::Tensor scales = at::ones({(R + 127) / 128, (C + 127) / 128}, at::kFloat);
  at::Tensor scaled = at::empty({R, C}, at::kFloat);
  const auto in = x.accessor<float, 2>();
  auto scale = scales.accessor<float, 2>(), out = scaled.accessor<float, 2>();
  for (int64_t bi = 0; bi < scales.size(0); ++bi) {
    for (int64_t bj = 0; bj < scales.size(1); ++bj) {
      const int64_t i_end = std::min(R, 128 * (bi + 1)), j_end = std::min(C, 128 * (bj + 1));
      float largest = 0;
      for (int64_t i = 128 * bi; i < i_end; ++i) {
        for (int64_t j = 128 * bj; j < j_end; ++j) largest = std::max(largest, std::abs(in[i][j]));
      }
      if (largest > 0) scale[bi][bj] = largest / 448;
      for (int64_t i = 128 * bi; i < i_end; ++i) {
        for (int64_t j = 128 * bj; j < j_end; ++j) out[i][j] = in[i][j] / scale[bi][bj];
      }
    }
  }
  return {scaled.to(at::kFloat8_e4m3fn), scales};
}

// And back, in fp32.
inline at::Tensor dequantized(const at::Tensor& weight, const at::Tensor& scales) {
  at::Tensor x = weight.to(at::kFloat);
  auto value = x.accessor<float, 2>();
  const auto scale = scales.accessor<float, 2>();
  for (int64_t i = 0; i < x.size(0); ++i) {
    for (int64_t j = 0; j < x.size(1); ++j) value[i][j] *= scale[i / 128][j / 128];
  }
  return x;
}

// Whether DeepSeek's folders hold this tensor in FP8: projections, but not the router's, the
// indexer's weights_proj, embedding, head or eh_proj.
inline bool published_in_fp8(const std::string& name, const at::Tensor& tensor) {
  if (tensor.dim() != 2) return false;
  for (const char* part :
       {"embed_tokens", "lm_head", "shared_head", "eh_proj", ".gate.", "weights_proj"}) {
    if (name.find(part) != std::string::npos) return false;
  }
  return true;
}

// A folder's tensors as DeepSeek publishes them.
inline std::map<std::string, at::Tensor> published(const std::map<std::string, at::Tensor>& from) {
  std::map<std::string, at::Tensor> tensors;
  for (const auto& [name, tensor] : from) {
    if (!published_in_fp8(name, tensor)) {
      tensors[name] = tensor;
      continue;
    }
    std::tie(tensors[name], tensors[name + "_scale_inv"]) = quantized(tensor);
  }
  return tensors;
}

// And what they mean.
inline std::map<std::string, at::Tensor> meaning_of(
    const std::map<std::string, at::Tensor>& published) {
  std::map<std::string, at::Tensor> tensors;
  for (const auto& [name, tensor] : published) {
    if (name.ends_with("_scale_inv")) continue;
    tensors[name] = tensor.scalar_type() == at::kFloat8_e4m3fn
                        ? dequantized(tensor, published.at(name + "_scale_inv"))
                        : tensor;
  }
  return tensors;
}

}  // namespace longhaul::testing
