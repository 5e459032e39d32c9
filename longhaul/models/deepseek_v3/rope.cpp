#include "longhaul/models/deepseek_v3/rope.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <numbers>

namespace longhaul::deepseek_v3 {
namespace {

// YaRN's attention temperature: 0.1 m ln(factor) + 1.
double yarn_mscale(double factor, double m) {
  return factor <= 1 ? 1.0 : 0.1 * m * std::log(factor) + 1.0;
}

// The (fractional) dim whose wave turns `rotations` times over the original context.
double correction_dim(double rotations, int64_t dim, double theta, int64_t original) {
  return static_cast<double>(dim) *
         std::log(static_cast<double>(original) / (rotations * 2 * std::numbers::pi)) /
         (2 * std::log(theta));
}

// 0: keep the frequency, 1: interpolate it; a ramp between the two corrections.
double interpolation(int64_t i, const ModelConfig& config) {
  const YarnConfig& yarn = *config.yarn;
  const int64_t dim = config.qk_rope_head_dim;
  const auto edge = [&](double beta) {
    return correction_dim(beta, dim, config.rope_theta, yarn.original_max_position_embeddings);
  };
  const double low = std::max(std::floor(edge(yarn.beta_fast)), 0.0);
  double high = std::min(std::ceil(edge(yarn.beta_slow)), static_cast<double>(dim - 1));
  if (low == high) high += 0.001;
  return std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
}

}  // namespace

Rope::Rope(const ModelConfig& config) : attention_scaling_(1.0) {
  const int64_t dim = config.qk_rope_head_dim;
  for (int64_t i = 0; i < dim / 2; ++i) {
    const double exponent = 2.0 * static_cast<double>(i) / static_cast<double>(dim);
    double frequency = std::pow(config.rope_theta, -exponent);
    if (config.yarn) {
      const double ramp = interpolation(i, config);
      frequency = frequency / config.yarn->factor * ramp + frequency * (1 - ramp);
    }
    inverse_frequencies_.push_back(frequency);
  }
  if (config.yarn) {
    attention_scaling_ = yarn_mscale(config.yarn->factor, config.yarn->mscale) /
                         yarn_mscale(config.yarn->factor, config.yarn->mscale_all_dim);
  }
}

RopeTable Rope::table(const at::Tensor& positions_BS, at::ScalarType dtype) const {
  const at::Tensor frequencies =
      at::tensor(inverse_frequencies_, at::kDouble).to(positions_BS.device());
  const at::Tensor angles = positions_BS.to(at::kDouble).unsqueeze(-1) * frequencies;
  return {(angles.cos() * attention_scaling_).to(dtype),
          (angles.sin() * attention_scaling_).to(dtype)};
}

double softmax_scale(const ModelConfig& config) {
  double scale = 1.0 / std::sqrt(static_cast<double>(config.qk_head_dim()));
  if (config.yarn && config.yarn->mscale_all_dim != 0) {
    const double mscale = yarn_mscale(config.yarn->factor, config.yarn->mscale_all_dim);
    scale *= mscale * mscale;
  }
  return scale;
}

}  // namespace longhaul::deepseek_v3
