#include "longhaul/models/deepseek_v3/indexer.h"

#include <ATen/ATen.h>

#include <cmath>

#include "longhaul/base/error.h"
#include "longhaul/ops/common.h"
#include "longhaul/ops/lightning_indexer/lightning_indexer.h"
#include "longhaul/ops/matmul/matmul.h"
#include "longhaul/ops/rotary_mul/rotary_mul.h"

namespace longhaul::deepseek_v3 {
namespace {

constexpr double kKeyNormEps = 1e-6;
}  // namespace

Tensor hadamard_matrix(int64_t n) {
  if (n < 1 || (n & (n - 1)) != 0) {
    fail_user("dsa.hadamard = true needs index_head_dim to be a power of two, it is {}", n);
  }
  Tensor h = at::ones({1, 1}, at::kDouble);
  while (h.size(0) < n) h = at::cat({at::cat({h, h}, 1), at::cat({h, -h}, 1)}, 0);
  return h / std::sqrt(static_cast<double>(n));
}

Indexer::Indexer(const ModelConfig& config, const ModelSettings& settings,
                 const nn::TensorSpec& spec)
    : heads_(config.index_n_heads),
      head_dim_(config.index_head_dim),
      rope_dim_(config.qk_rope_head_dim),
      topk_(config.index_topk),
      interleaved_(settings.indexer_rope_interleaved),
      wq_b_(config.q_lora_rank > 0 ? config.q_lora_rank : config.hidden_size, heads_ * head_dim_,
            spec),
      wk_(config.hidden_size, head_dim_, spec),
      weights_proj_(config.hidden_size, heads_, nn::exact(spec)),
      k_norm_(head_dim_, kKeyNormEps, spec) {
  if (settings.hadamard) hadamard_ = hadamard_matrix(head_dim_).to(settings.device);
  add_kernel("rope", rope_kernel_);
  add_child("wq_b", wq_b_);
  add_child("wk", wk_);
  add_child("k_norm", k_norm_);
  add_child("weights_proj", weights_proj_);
}

Tensor Indexer::rotate(const Tensor& x, const RopeTable& rope) const {
  const auto mode = interleaved_ ? ops::RotaryMode::kInterleaved : ops::RotaryMode::kHalfSplit;
  const Tensor turned =
      ops::rotary_mul(x.narrow(-1, 0, rope_dim_), rope.cos, rope.sin, mode, rope_kernel_);
  const Tensor whole = at::cat({turned, x.narrow(-1, rope_dim_, head_dim_ - rope_dim_)}, -1);
  return hadamard_.defined() ? ops::linear(whole, hadamard_.to(whole.scalar_type())) : whole;
}

ops::IndexerInputs Indexer::forward(const Tensor& x_BSD, const Tensor& q_latent_BSQ,
                                    const RopeTable& rope) const {
  const Tensor x = x_BSD.detach(), latent = q_latent_BSQ.detach();
  const int64_t B = x.size(0), S = x.size(1);
  const double scale = 1.0 / std::sqrt(static_cast<double>(heads_ * head_dim_));
  return {
      .query_BSHD = rotate(wq_b_.forward(latent).view({B, S, heads_, head_dim_}), rope),
      .key_BSD = rotate(k_norm_.forward(wk_.forward(x)), rope),
      .weights_BSH = weights_proj_.forward(x.to(ops::wide_type(x))) * scale,
  };
}

ops::IndexerSelection Indexer::select(const ops::IndexerInputs& inputs,
                                      const ops::KeyRange& visible, ops::Kernel kernel) const {
  return ops::lightning_indexer(inputs.query_BSHD, inputs.key_BSD, inputs.weights_BSH, visible,
                                topk_, kernel);
}

}  // namespace longhaul::deepseek_v3
