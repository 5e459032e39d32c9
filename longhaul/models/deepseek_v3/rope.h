// Rotary frequencies, plain and YaRN (Peng et al., 2023), and the attention scale that goes with
// them. Angles are computed in fp64, so long positions lose nothing.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "longhaul/models/deepseek_v3/model_config.h"

namespace longhaul::deepseek_v3 {

// cos and sin [B, S, R/2], fp32 or fp64, with YaRN's ratio of mscales multiplied in.
struct RopeTable {
  at::Tensor cos, sin;
};

class Rope {
 public:
  explicit Rope(const ModelConfig& config);

  // positions [B, S] int64 (a document's own), on any device.
  RopeTable table(const at::Tensor& positions_BS, at::ScalarType dtype) const;

  const std::vector<double>& inverse_frequencies() const { return inverse_frequencies_; }
  double attention_scaling() const { return attention_scaling_; }

 private:
  std::vector<double> inverse_frequencies_;  // R/2
  double attention_scaling_;
};

// (N + R)^-0.5, times mscale^2 with YaRN and mscale_all_dim.
double softmax_scale(const ModelConfig& config);

}  // namespace longhaul::deepseek_v3
