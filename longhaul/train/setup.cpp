#include "longhaul/train/setup.h"

#include <ATen/Context.h>

#include <algorithm>
#include <cstdlib>

#include "longhaul/base/error.h"
#include "longhaul/train/device.h"

namespace longhaul::train {
namespace {

at::ScalarType scalar_type(const std::string& name) {
  if (name == "float64") return at::kDouble;
  if (name == "bfloat16") return at::kBFloat16;
  LONGHAUL_CHECK(name == "float32", "dtype '{}'", name);
  return at::kFloat;
}

deepseek_v3::IndexerStage stage_of(const std::string& name) {
  using deepseek_v3::IndexerStage;
  if (name == "dense_warmup") return IndexerStage::kDenseWarmup;
  return name == "off" ? IndexerStage::kOff : IndexerStage::kSparse;
}

// The names of TorchTitan's that differ here.
std::string module_name(const std::string& name) {
  return name.ends_with("router.gate") ? "mlp.gate" : name;
}

deepseek_v3::Recomputation recomputation(const ActivationCheckpoint& options) {
  if (options.mode == "full") return {.every = 1};
  if (options.mode != "selective") return {};
  if (options.selective_ac_option != "op")
    return {.every = std::stoll(options.selective_ac_option)};
  deepseek_v3::Recomputation by_operator{.every = 1, .saved_operators = options.op_sac_save_list};
  for (const auto& name : options.per_op_sac_force_recompute_mm_shapes_by_fqns) {
    by_operator.unsaved_linears.push_back(module_name(name));
  }
  return by_operator;
}

optim::DecayType decay_type(const std::string& name) {
  if (name == "sqrt") return optim::DecayType::kSqrt;
  return name == "cosine" ? optim::DecayType::kCosine : optim::DecayType::kLinear;
}

}  // namespace

void set_determinism(const JobConfig& config) {
  const bool on = config.debug.deterministic;
  auto& context = at::globalContext();
  context.setDeterministicAlgorithms(on, config.debug.deterministic_warn_only);
  context.setDeterministicCuDNN(on);
  if (!on) return;
  context.setBenchmarkCuDNN(false);
  constexpr int kKeepTheUsers = 0;
  setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", kKeepTheUsers);
}

converters::Properties converter_properties(const JobConfig& config,
                                            const deepseek_v3::ModelConfig& shape) {
  const auto settings = model_settings(config, at::kCPU);
  const bool on_cuda = config.training.device == "cuda";  // wherever the job is read
  const bool indexes = settings.stage != deepseek_v3::IndexerStage::kOff;
  const int64_t tp = std::max<int64_t>(config.parallelism.tensor_parallel_degree, 1);
  const int64_t last_layer = shape.num_hidden_layers + shape.num_nextn_predict_layers - 1;
  return {.compute_dtype = settings.compute_dtype,
          .device = on_cuda ? at::Device(at::kCUDA, 0) : choose_device(config),
          .attention_heads = shape.num_attention_heads / tp,
          .index_heads = indexes ? shape.index_n_heads : 0,
          .has_routed_experts = shape.is_moe_layer(last_layer)};
}

void apply_converters(const JobConfig& config, deepseek_v3::Model& model) {
  name_setting(config, "model.converters", [&] {
    converters::apply(model, config.model.converters, converter_properties(config, model.config()));
  });
}

deepseek_v3::ModelSettings model_settings(const JobConfig& config, at::Device device) {
  deepseek_v3::ModelSettings settings;
  settings.device = device;
  settings.param_dtype = scalar_type(config.training.dtype);
  settings.compute_dtype = settings.param_dtype == at::kDouble
                               ? at::kDouble
                               : scalar_type(config.training.mixed_precision_param);
  settings.mla_form = config.model.mla_form == "expanded" ? deepseek_v3::MlaForm::kExpanded
                                                          : deepseek_v3::MlaForm::kAbsorbed;
  settings.stage = stage_of(config.dsa.stage);
  settings.indexer_loss_coeff = config.dsa.indexer_loss_coeff;
  settings.train_indexer = config.dsa.train_indexer;
  settings.hadamard = config.dsa.hadamard;
  settings.indexer_rope_interleaved = config.dsa.indexer_rope == "interleaved";
  settings.sequence_balance_loss_coeff = config.moe.sequence_balance_loss_coeff;
  settings.z_loss_coeff = config.moe.z_loss_coeff;
  settings.force_load_balance = config.debug.moe_force_load_balance;
  settings.recompute = recomputation(config.activation_checkpoint);
  settings.mtp_after_norm = config.mtp.hidden == "after_norm";
  settings.mtp_own_norm = config.mtp.own_norm;
  return settings;
}

optim::AdamWConfig adam_w_config(const JobConfig& config) {
  return {.beta1 = config.optimizer.beta1,
          .beta2 = config.optimizer.beta2,
          .eps = config.optimizer.eps,
          .weight_decay = config.optimizer.weight_decay,
          .no_decay = config.optimizer.no_decay};
}

optim::LrScheduleOptions lr_schedule_options(const JobConfig& config) {
  return {.lr = config.optimizer.lr,
          .steps = config.training.steps,
          .warmup_steps = config.lr_scheduler.warmup_steps,
          .decay_ratio = config.lr_scheduler.decay_ratio,
          .decay_type = decay_type(config.lr_scheduler.decay_type),
          .min_lr_factor = config.lr_scheduler.min_lr_factor};
}

BatchSizes batch_sizes(const JobConfig& config, int64_t data_ranks) {
  BatchSizes sizes{.local = config.training.local_batch_size,
                   .global = config.training.global_batch_size,
                   .data_ranks = data_ranks};
  if (sizes.global < 0) sizes.global = sizes.local * data_ranks;
  return sizes;
}

uint64_t seed_of(const JobConfig& config) {
  return static_cast<uint64_t>(config.debug.seed.value_or(0));
}

}  // namespace longhaul::train
