// How a model of a given shape is built and trained: what the job file says beyond the shape.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <string>
#include <vector>

#include "longhaul/models/deepseek_v3/model_config.h"
#include "longhaul/nn/module.h"

namespace longhaul::deepseek_v3 {

// The two training stages of the indexer (DeepSeek-V3.2 report, section 2.1.1), and none.
enum class IndexerStage {
  kSparse,       // top-k attention; the indexer learns over the selected keys
  kDenseWarmup,  // dense attention, trunk frozen; the indexer learns over all visible keys
  kOff,          // dense attention, the indexer is idle
};

// Absorbed: all heads share one key/value row of C + R; expanded: keys and values for each head.
enum class MlaForm { kAbsorbed, kExpanded };

// Activation checkpointing: blocks whose activations are not kept but computed again in the
// backward pass. The choices of experts and keys are kept in any case (context.h).
struct Recomputation {
  int64_t every = 0;  // every n-th block, MTP modules counted on after the last layer; 0: none
  // Operators whose results are kept all the same (ops/saved_results.h).
  std::vector<std::string> saved_operators = {};
  // Names of modules, or consecutive parts of them ("mlp.gate"): products with weights of their
  // sizes are not among them.
  std::vector<std::string> unsaved_linears = {};

  // Whether the block of this number, from 0 on, is computed again.
  bool covers(int64_t layer) const { return every > 0 && (layer + 1) % every == 0; }
};

struct ModelSettings {
  at::ScalarType param_dtype = at::kFloat;
  at::ScalarType compute_dtype = at::kFloat;
  at::Device device = at::kCPU;
  // Parameters are only shapes (on the Meta device) until someone gives them memory on `device`.
  bool parameters_on_meta = false;

  MlaForm mla_form = MlaForm::kAbsorbed;
  IndexerStage stage = IndexerStage::kSparse;
  double indexer_loss_coeff = 1.0;
  bool train_indexer = true;
  bool hadamard = false;                  // rotate the indexer's queries and keys
  bool indexer_rope_interleaved = false;  // DeepSeek-V3.2: half-split

  double sequence_balance_loss_coeff = 0.0;
  double z_loss_coeff = 0.0;
  bool force_load_balance = false;  // debugging: experts in turn, whatever the router says

  Recomputation recompute;

  bool mtp_after_norm = false;  // MTP takes the hidden state after the final norm
  bool mtp_own_norm = false;    // each MTP module has a final norm of its own
};

// Dtype and device of the parameters.
inline nn::TensorSpec parameter_spec(const ModelSettings& settings) {
  return {settings.param_dtype, settings.parameters_on_meta ? at::kMeta : settings.device};
}

// The stage that a model of this shape is in: without an indexer there is none.
inline IndexerStage stage_of(const ModelConfig& config, const ModelSettings& settings) {
  return config.has_indexer() ? settings.stage : IndexerStage::kOff;
}

inline bool indexer_learns(const ModelConfig& config, const ModelSettings& settings) {
  return stage_of(config, settings) != IndexerStage::kOff && settings.train_indexer &&
         settings.indexer_loss_coeff != 0;
}

}  // namespace longhaul::deepseek_v3
