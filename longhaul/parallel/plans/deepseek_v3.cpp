#include "longhaul/parallel/plans/deepseek_v3.h"

#include <ATen/ATen.h>

#include "longhaul/base/error.h"
#include "longhaul/parallel/collectives.h"

namespace longhaul::parallel {
namespace {

const Placement kWhole = Placement::replicate();
const Placement kSequence = Placement::shard(1);  // of [B, S, D]

// A gate, an up and a down projection behind one gather of their input.
void add_mlp(const std::string& name, TensorPlan& plan) {
  plan.push_back({name, prepare_input(kWhole)});
  plan.push_back({name + ".gate_proj", {.parameters = Placement::shard(0)}});
  plan.push_back({name + ".up_proj", {.parameters = Placement::shard(0)}});
  plan.push_back({name + ".down_proj", rowwise()});
}

void add_moe(const std::string& name, bool has_shared_experts, TensorPlan& plan) {
  plan.push_back({name, {.input = kSequence, .output = kSequence, .local = true}});
  plan.push_back({name + ".gate", {.untouched = true}});
  plan.push_back({name + ".experts", {.untouched = true}});
  if (has_shared_experts) add_mlp(name + ".shared_experts", plan);
}

void add_attention(const std::string& name, const deepseek_v3::Model& model, TensorPlan& plan) {
  const bool expanded = model.settings().mla_form == deepseek_v3::MlaForm::kExpanded;
  plan.push_back({name + (model.config().q_lora_rank > 0 ? ".q_b_proj" : ".q_proj"), colwise()});
  // Absorbed, its weight is used head by head and the latents go on as they are.
  plan.push_back({name + ".kv_b_proj",
                  expanded ? colwise() : ParallelStyle{.parameters = Placement::shard(0)}});
  plan.push_back({name + ".o_proj", rowwise()});
}

}  // namespace

TensorPlan deepseek_v3_plan(deepseek_v3::Model& model) {
  const auto& config = model.config();
  const auto stages = model.stages();
  TensorPlan plan;
  if (stages.embedding != nullptr) {
    plan.push_back(
        {"model.embed_tokens", {.parameters = Placement::shard(0), .output = kSequence}});
  }
  if (stages.norm != nullptr) plan.push_back({"lm_head", {.parameters = Placement::shard(0)}});
  for (const int64_t layer : model.layers()) {
    const std::string name = "model.layers." + std::to_string(layer);
    add_attention(name + ".self_attn", model, plan);
    if (config.is_moe_layer(layer)) {
      add_moe(name + ".mlp", config.n_shared_experts > 0, plan);
    } else {
      add_mlp(name + ".mlp", plan);
    }
  }
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
      moe->set_over_shares([axis](const Tensor& statistic) { return sum_over(statistic, axis); });
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
