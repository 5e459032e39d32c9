// The lightning indexer: scores every visible key for every query and selects the top-k. It reads
// detached activations, so it learns from its own loss only and the trunk learns nothing from it.
// B batch, S sequence, D hidden, Q q_lora_rank, Hi/Di indexer heads and head dim, R rope dims.
#pragma once

#include "longhaul/models/deepseek_v3/context.h"
#include "longhaul/models/deepseek_v3/model_config.h"
#include "longhaul/models/deepseek_v3/settings.h"
#include "longhaul/nn/layers.h"
#include "longhaul/ops/indexer_kl_loss/indexer_kl_loss.h"
#include "longhaul/ops/lightning_indexer/lightning_indexer.h"

namespace longhaul::deepseek_v3 {

// Sylvester's Hadamard matrix [n, n] in fp64, scaled to be orthonormal: H H^T = 1. UserError unless
// n is a power of two.
Tensor hadamard_matrix(int64_t n);

class Indexer : public nn::Module {
 public:
  Indexer(const ModelConfig& config, const ModelSettings& settings, const nn::TensorSpec& spec);

  // x [B, S, D]; q_latent [B, S, Q], the normalised query latent (x itself without q_lora).
  ops::IndexerInputs forward(const Tensor& x_BSD, const Tensor& q_latent_BSQ,
                             const RopeTable& rope) const;

  // The top-k visible keys.
  ops::IndexerSelection select(const ops::IndexerInputs& inputs, const ops::KeyRange& visible,
                               ops::Kernel kernel) const;

  // The Hadamard matrix [Di, Di] that turns queries and keys, or undefined.
  Tensor& rotation() { return hadamard_; }

 private:
  Tensor rotate(const Tensor& x, const RopeTable& rope) const;

  int64_t heads_, head_dim_, rope_dim_, topk_;
  bool interleaved_;
  ops::Kernel rope_kernel_ = ops::Kernel::kReference;
  Tensor hadamard_;
  nn::Linear wq_b_, wk_, weights_proj_;
  nn::LayerNorm k_norm_;
};

}  // namespace longhaul::deepseek_v3
