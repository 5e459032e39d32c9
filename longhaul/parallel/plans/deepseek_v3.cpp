#include "longhaul/parallel/plans/deepseek_v3.h"

#include <ATen/ATen.h>

#include "longhaul/base/error.h"
#include "longhaul/parallel/collectives.h"

namespace longhaul::parallel {

namespace {

void add(TensorPlan& plan, const TensorPlan& entries) {
  plan.insert(plan.end(), entries.begin(), entries.end());
}

TensorPlan attention_plan(const deepseek_v3::Model& model) {
  // Absorbed, the weight is used head by head and the latents go on as they are.
  const bool absorbed = model.settings().mla_form == deepseek_v3::MlaForm::kAbsorbed;
  TensorPlan plan = {
      {"self_attn.kv_a_proj_with_mqa", sequence_parallel()},
      {"self_attn.kv_a_layernorm", sequence_parallel()},
      {"self_attn.kv_b_proj", absorbed ? colwise_parallel(kAsItComes) : colwise_parallel()},
      {"self_attn.o_proj", rowwise_parallel()},
  };
  if (model.config().q_lora_rank > 0) {
    add(plan, {{"self_attn.q_a_proj", sequence_parallel()},
               {"self_attn.q_a_layernorm", sequence_parallel()},
               {"self_attn.q_b_proj", colwise_parallel()}});
  } else {
    add(plan, {{"self_attn.q_proj", colwise_parallel()}});
  }
  if (model.config().has_indexer()) {
    add(plan, {{"self_attn.indexer.wq_b", sequence_parallel()},
               {"self_attn.indexer.wk", sequence_parallel()},
               {"self_attn.indexer.k_norm", sequence_parallel()},
               {"self_attn.indexer.weights_proj", sequence_parallel()}});
  }
  return plan;
}

// Of layers with experts, and of dense ones.
TensorPlan feed_forward_plan(const deepseek_v3::Model& model) {
  TensorPlan plan;
  bool dense = false, experts = false;
  for (const int64_t layer : model.layers()) {
    if (!model.config().is_moe_layer(layer)) {
      dense = true;
      continue;
    }
    experts = true;
    add(plan, {{"layers." + std::to_string(layer) + ".mlp",
                prepare_module_input_output(kSequence, kSequence)}});
  }
  const bool shared = experts && model.config().n_shared_experts > 0;
  if (experts) add(plan, {{"mlp.gate", no_parallel()}, {"mlp.experts", no_parallel()}});
  // One gather for two products.
  if (shared) add(plan, {{"mlp.shared_experts", prepare_module_input(kWhole)}});
  if (dense) add(plan, {{"mlp", prepare_module_input(kWhole)}});
  if (dense || shared) {
    add(plan, {{"gate_proj", colwise_parallel(kAsItComes)},
               {"up_proj", colwise_parallel(kAsItComes)},
               {"down_proj", rowwise_parallel()}});
  }
  return plan;
}

TensorPlan mtp_plan(const deepseek_v3::Model& model) {
  TensorPlan plan = {{"enorm", sequence_parallel()},
                     {"hnorm", sequence_parallel()},
                     {"eh_proj", sequence_parallel()}};
  if (model.settings().mtp_own_norm) add(plan, {{"shared_head.norm", sequence_parallel()}});
  return plan;
}

}  // namespace

TensorPlan deepseek_v3_plan(deepseek_v3::Model& model) {
  TensorPlan plan;
  const auto stages = model.stages();
  if (stages.embedding != nullptr) {
    add(plan, {{"model.embed_tokens", rowwise_parallel_embedding()}});
  }
  if (stages.norm != nullptr) {
    add(plan, {{"model.norm", sequence_parallel()}, {"lm_head", colwise_parallel(kAsItComes)}});
  }
  if (!stages.mtp.empty()) add(plan, mtp_plan(model));
  if (model.layers().empty()) return plan;
  add(plan, {{"input_layernorm", sequence_parallel()},
             {"post_attention_layernorm", sequence_parallel()}});
  add(plan, attention_plan(model));
  add(plan, feed_forward_plan(model));
  return plan;
}

void check_tensor_parallel(const deepseek_v3::ModelConfig& config, int64_t ranks) {
  if (config.num_attention_heads % ranks != 0) {
    fail_user(
        "parallelism.tensor_parallel_degree {}: the model's {} attention heads cannot be dealt out "
        "evenly; choose a degree that divides {}",
        ranks, config.num_attention_heads, config.num_attention_heads);
  }
}

std::unique_ptr<TensorParallel> apply_tensor_parallel(deepseek_v3::Model& model,
                                                      const dtensor::Mesh& mesh) {
  const auto axis = mesh->shared_axis("tp");
  if (axis->size() == 1) return nullptr;
  check_tensor_parallel(model.config(), axis->size());
  auto applied = std::make_unique<TensorParallel>(model, deepseek_v3_plan(model), mesh);
  for (const auto& [name, module] : model.modules()) {
    if (auto* moe = dynamic_cast<deepseek_v3::Moe*>(module)) {
      moe->set_over_shares([axis](const Tensor& counts) { return sum_over(counts, axis); });
    }
    auto* indexer = dynamic_cast<deepseek_v3::Indexer*>(module);
    if (indexer != nullptr && indexer->rotation().defined()) {
      indexer->rotation() = dtensor::distribute(indexer->rotation(), mesh, {kWhole});
    }
  }
  return applied;
}

deepseek_v3::Batch on_tensor_mesh(const deepseek_v3::Batch& batch, const dtensor::Mesh& mesh) {
  deepseek_v3::Batch on_mesh = batch;
  for (auto& slots : on_mesh.towers) {
    slots.valid = dtensor::from_local(slots.valid, mesh, {kWhole});
  }
  return on_mesh;
}

}  // namespace longhaul::parallel
