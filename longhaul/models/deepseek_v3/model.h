// The DeepSeek-V3 / V3.2 language model: embedding, blocks, final norm, output head, and MTP
// modules. Single-device maths that knows nothing of parallelism, kernels or the device it runs on.
// B batch, S sequence, D hidden, V vocabulary.
#pragma once

#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "longhaul/models/deepseek_v3/attention.h"
#include "longhaul/models/deepseek_v3/context.h"
#include "longhaul/models/deepseek_v3/model_config.h"
#include "longhaul/models/deepseek_v3/moe.h"
#include "longhaul/models/deepseek_v3/settings.h"
#include "longhaul/nn/init.h"
#include "longhaul/nn/layers.h"
#include "longhaul/ops/saved_results.h"

namespace longhaul::deepseek_v3 {

// x + attention(norm(x)), then x + feed_forward(norm(x)).
class Block : public nn::Module {
 public:
  Block(int64_t layer, const ModelConfig& config, const ModelSettings& settings);
  Tensor forward(const Tensor& x_BSD, const Sequence& sequence, const ForwardContext& ctx) const;

  int64_t layer() const { return layer_; }
  // The parts of a mixture-of-experts block, else nullptr.
  Router* router() { return moe_ ? &moe_->router() : nullptr; }
  Experts* experts() { return moe_ ? &moe_->experts() : nullptr; }

 protected:
  int64_t layer_;
  nn::RMSNorm input_layernorm_, post_attention_layernorm_;
  Attention self_attn_;
  std::optional<Mlp> mlp_;
  std::optional<Moe> moe_;
};

// Multi-token prediction of one depth (DeepSeek-V3 report, section 2.2): a block over
// W_eh [norm_e(embedding), norm_h(hidden)].
class MtpModule : public Block {
 public:
  MtpModule(int64_t layer, const ModelConfig& config, const ModelSettings& settings);
  // `embedding` of the token this depth reads, `hidden` of the previous tower; both [B, S, D].
  Tensor forward(const Tensor& embedding_BSD, const Tensor& hidden_BSD, const Sequence& sequence,
                 const ForwardContext& ctx) const;
  // The final norm of this module's own, if the settings ask for one. It stands outside of the
  // block: the model registers and applies it.
  nn::RMSNorm* own_norm() { return own_norm_ ? &*own_norm_ : nullptr; }

 private:
  nn::RMSNorm enorm_, hnorm_;
  nn::Linear eh_proj_;
  std::optional<nn::RMSNorm> own_norm_;
};

// Consecutive parts of a model, such as the stages of a pipeline: what one of them holds. Names,
// initial weights and layer numbers are those of the whole model.
struct ModelPart {
  int64_t first_layer = 0;
  int64_t end_layer = kAllLayers;  // past its last
  bool embedding = true;           // token ids come in, not hidden states
  bool head = true;                // final norm, output projection and MTP modules

  static constexpr int64_t kAllLayers = std::numeric_limits<int64_t>::max();
};

class Model : public nn::Module {
 public:
  // Builds `part` of the model only. MTP modules read the embedding, so that a part with them has a
  // copy of it: its gradient in the whole model is the sum over both. Error if the part's layers
  // are not some of the model's.
  Model(const ModelConfig& config, const ModelSettings& settings, const ModelPart& part = {});

  // Hidden states after the final norm, [B, S, D] in the compute dtype: [0] of the trunk, [k] of
  // the MTP module of depth k. As many as the batch has towers. `batch` is on the model's device.
  //
  // A part without the embedding starts from `hidden_BSD`, which is what the part before it
  // returned; a part without the head returns one tensor, [B, S, D], for the part after it.
  std::vector<Tensor> forward(const Batch& batch, const ForwardContext& ctx,
                              const Tensor& hidden_BSD = {}) const;

  // [..., D] to [..., V].
  Tensor logits(const Tensor& hidden) const { return lm_head().forward(hidden); }
  const nn::Linear& lm_head() const;
  // The sum of the labels' cross-entropies over the output projection (ops/cross_entropy). `hidden`
  // [..., D] of forward(), `labels` [...].
  Tensor cross_entropy(const Tensor& hidden, const Tensor& labels) const;

  // Routers by layer number; MTP modules count on after the last layer of the whole model.
  std::vector<std::pair<int64_t, Router*>> routers();
  // The routed experts of each layer that has some.
  std::vector<Experts*> experts();

  // The parts that compute one after another: what is hooked (nn::Module::hooked) in forward() and
  // cross_entropy(), in the order of the first use. Null: not in this part.
  struct Stages {
    nn::Module* embedding = nullptr;
    std::vector<nn::Module*> trunk = {};  // blocks
    nn::Module* norm = nullptr;           // the last norm
    std::vector<nn::Module*> mtp = {};    // blocks
    std::vector<nn::Module*> head = {};   // MTP modules' own last norms, and lm_head
  };
  Stages stages();

  // The numbers of the layers that this part holds.
  std::vector<int64_t> layers() const;

  const ModelConfig& config() const { return config_; }
  const ModelSettings& settings() const { return settings_; }
  // Layers of the trunk plus MTP modules, of the whole model.
  int64_t num_layers() const {
    return config_.num_hidden_layers + config_.num_nextn_predict_layers;
  }

 private:
  // f(inputs, ctx), the forward pass of `block`, whose activations are computed again in the
  // backward pass if so set. The batch must live until then.
  template <typename F>
  Tensor run_block(const Block& block, const F& f, const std::vector<Tensor>& inputs,
                   const ForwardContext& ctx) const;
  void add_blocks();
  void add_head();
  Tensor embed(const Tensor& ids) const;
  Tensor trunk(const Batch& batch, Tensor h_BSD, const ForwardContext& ctx) const;
  Tensor normed(const nn::RMSNorm& norm, const Tensor& hidden) const;
  Sequence sequence_of(const Batch& batch, size_t tower, const ForwardContext& ctx) const;
  void freeze_idle_parameters();
  ops::SavePolicy save_policy() const;

  ModelConfig config_;
  ModelSettings settings_;
  ModelPart part_;
  ops::SavePolicy save_policy_;  // of recomputed blocks
  Rope rope_;
  std::optional<nn::Embedding> embed_tokens_;
  std::vector<std::unique_ptr<Block>> layers_;
  std::vector<std::unique_ptr<MtpModule>> mtp_;
  std::optional<nn::RMSNorm> norm_;
  std::optional<nn::Linear> lm_head_;
  ops::Kernel loss_kernel_ = ops::Kernel::kReference;
};

// The weights of products in blocks whose module's name has the consecutive parts `name`.
std::vector<nn::NamedParameter> block_linears(const Model& model, const std::string& name);

// Which part of the whole a parameter's tensor is.
using PartOf = std::function<nn::Part(const nn::NamedParameter&)>;
inline nn::Part whole_parameter(const nn::NamedParameter& parameter) {
  return nn::whole(*parameter.tensor);
}

// Initial weights (reference: the DeepSeek-V3 report and docs/step.md): normal with `std` for
// matrices and the embedding, norms 1, biases 0; with `depth_scale` o_proj and down_proj are
// divided by sqrt(2 * layers). A function of (seed, name, global element) only.
void initialize(Model& model, uint64_t seed, double std, bool depth_scale,
                const PartOf& part_of = whole_parameter);

}  // namespace longhaul::deepseek_v3
