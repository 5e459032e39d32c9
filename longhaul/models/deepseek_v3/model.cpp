#include "longhaul/models/deepseek_v3/model.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cmath>

#include "longhaul/base/error.h"
#include "longhaul/nn/init.h"
#include "longhaul/nn/profile_range.h"
#include "longhaul/nn/recompute.h"
#include "longhaul/ops/common.h"
#include "longhaul/ops/cross_entropy/cross_entropy.h"

namespace longhaul::deepseek_v3 {
namespace {

bool is_indexer(const std::string& name) { return name.find(".indexer.") != std::string::npos; }

bool ends_with(const std::string& name, const std::string& suffix) {
  return name.size() >= suffix.size() &&
         name.compare(name.size() - suffix.size(), suffix.size(), suffix) == 0;
}

}  // namespace

Block::Block(int64_t layer, const ModelConfig& config, const ModelSettings& settings)
    : layer_(layer),
      input_layernorm_(config.hidden_size, config.rms_norm_eps, parameter_spec(settings)),
      post_attention_layernorm_(config.hidden_size, config.rms_norm_eps, parameter_spec(settings)),
      self_attn_(layer, config, settings) {
  add_child("input_layernorm", input_layernorm_);
  add_child("self_attn", self_attn_);
  add_child("post_attention_layernorm", post_attention_layernorm_);
  if (config.is_moe_layer(layer)) {
    add_child("mlp", moe_.emplace(layer, config, settings));
  } else {
    add_child("mlp",
              mlp_.emplace(config.hidden_size, config.intermediate_size, parameter_spec(settings)));
  }
}

Tensor Block::forward(const Tensor& x_BSD, const Sequence& sequence,
                      const ForwardContext& ctx) const {
  const nn::ProfileRange range("model.layers.{}", layer_);
  if (ctx.probe) ctx.probe("hidden", layer_, x_BSD);
  const Tensor attended = self_attn_.forward(input_layernorm_.forward(x_BSD), sequence, ctx);
  const auto [normed, h] = post_attention_layernorm_.forward_add(attended, x_BSD);
  const nn::ProfileRange mlp_range("model.layers.{}.mlp", layer_);
  return h + (moe_ ? moe_->forward(normed, sequence, ctx) : mlp_->forward(normed));
}

MtpModule::MtpModule(int64_t layer, const ModelConfig& config, const ModelSettings& settings)
    : Block(layer, config, settings),
      enorm_(config.hidden_size, config.rms_norm_eps, parameter_spec(settings)),
      hnorm_(config.hidden_size, config.rms_norm_eps, parameter_spec(settings)),
      eh_proj_(2 * config.hidden_size, config.hidden_size, parameter_spec(settings)) {
  add_child("enorm", enorm_);
  add_child("hnorm", hnorm_);
  add_child("eh_proj", eh_proj_);
  if (settings.mtp_own_norm) {
    own_norm_.emplace(config.hidden_size, config.rms_norm_eps, parameter_spec(settings));
  }
}

Tensor MtpModule::forward(const Tensor& embedding_BSD, const Tensor& hidden_BSD,
                          const Sequence& sequence, const ForwardContext& ctx) const {
  const Tensor both = at::cat({enorm_.forward(embedding_BSD), hnorm_.forward(hidden_BSD)}, -1);
  return Block::forward(eh_proj_.forward(both), sequence, ctx);
}

Model::Model(const ModelConfig& config, const ModelSettings& settings, const ModelPart& part)
    : config_(config), settings_(settings), part_(part), rope_(config) {
  const int64_t layers = config.num_hidden_layers;
  if (part_.end_layer == ModelPart::kAllLayers) part_.end_layer = layers;
  LONGHAUL_CHECK(
      0 <= part_.first_layer && part_.first_layer <= part_.end_layer && part_.end_layer <= layers,
      "a part with layers {} to {} of a model with {}", part_.first_layer, part_.end_layer, layers);
  if (part_.embedding || (part_.head && config.num_nextn_predict_layers > 0)) {
    add_child("model.embed_tokens", embed_tokens_.emplace(config.vocab_size, config.hidden_size,
                                                          parameter_spec(settings)));
  }
  add_blocks();
  if (part_.head) add_head();
  freeze_idle_parameters();
  save_policy_ = save_policy();
}

void Model::add_blocks() {
  for (int64_t i = part_.first_layer; i < part_.end_layer; ++i) {
    layers_.push_back(std::make_unique<Block>(i, config_, settings_));
    add_child("model.layers." + std::to_string(i), *layers_.back());
  }
}

void Model::add_head() {
  for (int64_t i = config_.num_hidden_layers; i < num_layers(); ++i) {
    mtp_.push_back(std::make_unique<MtpModule>(i, config_, settings_));
    const std::string name = "model.layers." + std::to_string(i);
    add_child(name, *mtp_.back());
    if (auto* norm = mtp_.back()->own_norm()) add_child(name + ".shared_head.norm", *norm);
  }
  const auto spec = parameter_spec(settings_);
  add_child("model.norm", norm_.emplace(config_.hidden_size, config_.rms_norm_eps, spec));
  add_child("lm_head", lm_head_.emplace(config_.hidden_size, config_.vocab_size, spec));
  add_kernel("cross_entropy", loss_kernel_);
}

const nn::Linear& Model::lm_head() const {
  LONGHAUL_CHECK(lm_head_.has_value(), "this part of the model has no output projection");
  return *lm_head_;
}

Tensor Model::cross_entropy(const Tensor& hidden, const Tensor& labels) const {
  return lm_head().hooked({hidden}, [&](const std::vector<Tensor>& x) {
    return ops::linear_cross_entropy(x[0], lm_head().weight, labels, loss_kernel_);
  });
}

ops::SavePolicy Model::save_policy() const {
  ops::SavePolicy policy{.operators = settings_.recompute.saved_operators};
  for (const auto& name : settings_.recompute.unsaved_linears) {
    for (const auto& weight : block_linears(*this, name)) {
      policy.recomputed_weights.push_back({weight.tensor->size(0), weight.tensor->size(1)});
    }
  }
  return policy;
}

// A parameter that does not learn has no gradient at all, so the optimizer leaves it alone.
void Model::freeze_idle_parameters() {
  const bool indexer = indexer_learns(config_, settings_);
  const bool trunk = stage_of(config_, settings_) != IndexerStage::kDenseWarmup;
  for (auto& parameter : parameters()) {
    parameter.tensor->set_requires_grad(is_indexer(parameter.name) ? indexer : trunk);
  }
}

Sequence Model::sequence_of(const Batch& batch, size_t tower, const ForwardContext& ctx) const {
  LONGHAUL_CHECK(tower < ctx.counts.tokens.size(), "no global counts for tower {}", tower);
  const auto& slots = batch.towers[tower];
  const auto table_dtype = settings_.compute_dtype == at::kDouble ? at::kDouble : at::kFloat;
  return {&slots, rope_.table(slots.positions, table_dtype), ctx.counts.tokens[tower],
          batch.cut.get()};
}

// A recomputed pass repeats the first one's choices and records nothing.
template <typename F>
Tensor Model::run_block(const Block& block, const F& f, const std::vector<Tensor>& inputs,
                        const ForwardContext& ctx) const {
  const auto hooked = [&block, f](const std::vector<Tensor>& x, const ForwardContext& inner) {
    return block.hooked(x, [&](const std::vector<Tensor>& y) { return f(y, inner); });
  };
  const bool differentiable = at::GradMode::is_enabled() && inputs[0].requires_grad();
  const bool again = settings_.recompute.covers(block.layer());
  if (!again || ctx.pass != Pass::kTrain || !differentiable) return hooked(inputs, ctx);
  const auto decisions = std::make_shared<Decisions>();
  return nn::recompute(
      [=](const std::vector<Tensor>& x, bool again) {
        ForwardContext inner = ctx;
        if (again) inner.pass = Pass::kRecompute;
        if (inner.decisions == nullptr) inner.decisions = decisions.get();
        return hooked(x, inner);
      },
      inputs, save_policy_);
}

Tensor Model::embed(const Tensor& ids) const {
  const nn::ProfileRange range("model.embed_tokens");
  return embed_tokens_->hooked({ids}, [&](const std::vector<Tensor>& x) {
    return embed_tokens_->forward(x[0], settings_.compute_dtype);
  });
}

Tensor Model::normed(const nn::RMSNorm& norm, const Tensor& hidden) const {
  const nn::ProfileRange range("model.norm");
  return norm.hooked({hidden}, [&](const std::vector<Tensor>& x) { return norm.forward(x[0]); });
}

Tensor Model::trunk(const Batch& batch, Tensor h_BSD, const ForwardContext& ctx) const {
  const Sequence sequence = sequence_of(batch, 0, ctx);
  for (const auto& layer : layers_) {
    const auto forward = [&block = *layer, sequence](const std::vector<Tensor>& x,
                                                     const ForwardContext& inner) {
      return block.forward(x[0], sequence, inner);
    };
    h_BSD = run_block(*layer, forward, {h_BSD}, ctx);
  }
  return h_BSD;
}

std::vector<Tensor> Model::forward(const Batch& batch, const ForwardContext& ctx,
                                   const Tensor& hidden_BSD) const {
  LONGHAUL_CHECK(!batch.towers.empty() && (!part_.head || batch.towers.size() <= mtp_.size() + 1),
                 "a batch with {} towers for {} MTP modules", batch.towers.size(), mtp_.size());
  LONGHAUL_CHECK(hidden_BSD.defined() != part_.embedding, "{}",
                 part_.embedding ? "this part of the model starts from the batch's token ids"
                                 : "this part of the model wants the hidden states before it");
  Tensor h = trunk(batch, part_.embedding ? embed(batch.towers[0].input_ids) : hidden_BSD, ctx);
  if (!part_.head) return {h};
  std::vector<Tensor> hidden = {normed(*norm_, h)};
  if (settings_.mtp_after_norm) h = hidden[0];

  for (size_t k = 1; k < batch.towers.size(); ++k) {
    const auto& slots = batch.towers[k];
    auto& module = *mtp_[k - 1];
    const Tensor embedding = embed(slots.input_ids) * slots.valid.unsqueeze(-1);
    const auto forward = [&module, sequence = sequence_of(batch, k, ctx)](
                             const std::vector<Tensor>& x, const ForwardContext& inner) {
      return module.forward(x[0], x[1], sequence, inner);
    };
    h = run_block(module, forward, {embedding, h}, ctx);
    hidden.push_back(normed(module.own_norm() ? *module.own_norm() : *norm_, h));
    if (settings_.mtp_after_norm) h = hidden.back();
  }
  return hidden;
}

Model::Stages Model::stages() {
  Stages stages{.embedding = embed_tokens_ ? &*embed_tokens_ : nullptr,
                .norm = norm_ ? &*norm_ : nullptr};
  for (auto& block : layers_) stages.trunk.push_back(block.get());
  for (auto& block : mtp_) {
    stages.mtp.push_back(block.get());
    if (auto* norm = block->own_norm()) stages.head.push_back(norm);
  }
  if (lm_head_) stages.head.push_back(&*lm_head_);
  return stages;
}

std::vector<int64_t> Model::layers() const {
  std::vector<int64_t> numbers;
  for (const auto& block : layers_) numbers.push_back(block->layer());
  for (const auto& block : mtp_) numbers.push_back(block->layer());
  return numbers;
}

std::vector<std::pair<int64_t, Router*>> Model::routers() {
  std::vector<std::pair<int64_t, Router*>> found;
  const auto add = [&](Block& block) {
    if (block.router() != nullptr) found.emplace_back(block.layer(), block.router());
  };
  for (auto& block : layers_) add(*block);
  for (auto& block : mtp_) add(*block);
  return found;
}

std::vector<Experts*> Model::experts() {
  std::vector<Experts*> found;
  const auto add = [&](Block& block) {
    if (block.experts() != nullptr) found.push_back(block.experts());
  };
  for (auto& block : layers_) add(*block);
  for (auto& block : mtp_) add(*block);
  return found;
}

std::vector<nn::NamedParameter> block_linears(const Model& model, const std::string& name) {
  std::vector<nn::NamedParameter> found;
  for (const auto& parameter : model.parameters()) {
    const std::string path = "." + parameter.name;  // ends in ".weight"
    if (!path.starts_with(".model.layers.") || parameter.tensor->dim() != 2) continue;
    if (path.find("." + name + ".") != std::string::npos) found.push_back(parameter);
  }
  return found;
}

void initialize(Model& model, uint64_t seed, double std, bool depth_scale, const PartOf& part_of) {
  const at::NoGradGuard no_grad;
  const double residual_std =
      depth_scale ? std / std::sqrt(2.0 * static_cast<double>(model.config().num_hidden_layers))
                  : std;
  for (auto& parameter : model.parameters()) {
    const bool residual =
        ends_with(parameter.name, "o_proj.weight") || ends_with(parameter.name, "down_proj.weight");
    switch (parameter.init) {
      case nn::Init::kNormal:
        nn::fill_normal(*parameter.tensor, CounterRng(seed, parameter.name),
                        residual ? residual_std : std, part_of(parameter));
        break;
      case nn::Init::kOnes:
        parameter.tensor->fill_(1);
        break;
      case nn::Init::kZeros:
        parameter.tensor->zero_();
        break;
    }
  }
  for (auto& buffer : model.buffers()) buffer.tensor->zero_();
}

}  // namespace longhaul::deepseek_v3
