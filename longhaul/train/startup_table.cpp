#include "longhaul/train/startup_table.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "longhaul/base/system.h"
#include "longhaul/base/text.h"
#include "longhaul/config/capability.h"
#include "longhaul/models/deepseek_v3/flops.h"
#include "longhaul/ops/cpu/isa.h"
#include "longhaul/ops/matmul/matmul.h"

namespace longhaul::train {
namespace {

// As the job file writes it.
std::string dtype_name(at::ScalarType dtype) {
  return dtype == at::kDouble ? "float64" : dtype == at::kFloat ? "float32" : "bfloat16";
}

// "dsa (6 modules) on avx512_bf16 kernels", or "none: ...".
std::string fused_kernels(const nn::Module& model, bool vocabulary_is_cut) {
  std::map<std::string, int> modules;
  for (const auto& [module, operation, kernel] : model.kernels()) {
    if (vocabulary_is_cut && operation == "cross_entropy") continue;  // which has no kernel then
    if (*kernel == ops::Kernel::kFused) ++modules[operation];
  }
  if (modules.empty()) return "none: every operator is the reference";
  std::string text;
  for (const auto& [operation, count] : modules) {
    text += fmt::format("{}{} ({} modules)", text.empty() ? "" : ", ", operation, count);
  }
  const auto& chosen = cpu::chosen_isa();
  text += fmt::format(" on {} kernels", cpu::name_of(chosen.isa));
  if (chosen.pointwise == chosen.isa) return text;
  return text + fmt::format(", {} where they move memory", cpu::name_of(chosen.pointwise));
}

class Table {
 public:
  void row(const std::string& name, const std::string& value) {
    text_ += fmt::format("  {:<14}{}\n", name, value);
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

std::string bytes(int64_t n) { return human_bytes(static_cast<double>(n)); }

int64_t trained_bytes(const deepseek_v3::Model& model) {
  int64_t sum = 0;
  for (const auto& p : model.parameters())
    sum += p.tensor->requires_grad() ? p.tensor->nbytes() : 0;
  return sum;
}

int64_t all_bytes(const deepseek_v3::Model& model) {
  int64_t sum = 0;
  for (const auto& p : model.parameters()) sum += static_cast<int64_t>(p.tensor->nbytes());
  return sum;
}

std::string indexer_text(const JobConfig& config, const deepseek_v3::Model& model) {
  const auto& shape = model.config();
  if (!shape.has_indexer()) return "none: dense attention";
  std::string text = fmt::format("stage {}, top-{} keys", config.dsa.stage, shape.index_topk);
  if (config.dsa.stage == "off") return "stage off: dense attention";
  const bool learns = deepseek_v3::indexer_learns(shape, model.settings());
  text += learns ? fmt::format(", KL loss x {}", config.dsa.indexer_loss_coeff) : ", frozen";
  return config.dsa.hadamard ? text + ", Hadamard" : text;
}

std::string activations_text(const deepseek_v3::Recomputation& recompute) {
  if (recompute.every == 0) return "all kept";
  const std::string blocks =
      recompute.every == 1 ? "every block" : fmt::format("1 block of {}", recompute.every);
  if (recompute.saved_operators.empty()) return blocks + " computed again in the backward pass";
  return fmt::format("{} computed again in the backward pass, but for {}", blocks,
                     fmt::join(recompute.saved_operators, ", "));
}

std::string moe_text(const JobConfig& config, const deepseek_v3::ModelConfig& shape) {
  if (shape.n_routed_experts == 0) return "none";
  return fmt::format("{} experts, top-{}, {} shared; bias update {}, balance loss {}, z-loss {}",
                     shape.n_routed_experts, shape.num_experts_per_tok, shape.n_shared_experts,
                     config.moe.bias_update_speed, config.moe.sequence_balance_loss_coeff,
                     config.moe.z_loss_coeff);
}

}  // namespace

std::string startup_table(const JobConfig& config, const ResolvedModel& resolved,
                          Trainer& trainer) {
  const auto& shape = resolved.shape;
  const auto& model = trainer.model();
  const auto counts = deepseek_v3::count_parameters(shape, model.settings());
  const auto sizes = batch_sizes(config, trainer.dims().data_size());
  const int64_t trained = trained_bytes(model);
  const auto& settings = model.settings();
  Table table;
  table.row("model", fmt::format("{} ({})", config.model.name, resolved.source));
  table.row("parameters", fmt::format("{} total, {} active a token", with_commas(counts.total),
                                      with_commas(counts.active)));
  table.row("memory",
            fmt::format("weights {}, gradients {}, moments {}, activations not counted; machine {}",
                        bytes(all_bytes(model)), bytes(trained), bytes(2 * trained),
                        bytes(machine_memory_bytes())));
  table.row("compute", fmt::format("{} on {}, weights {}, {} threads, peak {:.0f} GFLOP/s measured",
                                   dtype_name(settings.compute_dtype), settings.device.str(),
                                   dtype_name(settings.param_dtype), at::get_num_threads(),
                                   trainer.peak_flops() / 1e9));
  if (settings.device.is_cpu() && settings.compute_dtype != at::kDouble) {
    table.row("matmul", "fp32 by " + ops::fp32_product_kernels());
  }
  table.row("converters", fused_kernels(model, trainer.dims().degrees.tp > 1));
  if (config.debug.deterministic) {
    table.row("determinism",
              fmt::format("only deterministic algorithms, else {}",
                          config.debug.deterministic_warn_only ? "a warning" : "an error"));
  }
  if (const auto& degrees = trainer.dims().degrees; degrees.ranks > 1) {
    table.row("ranks", degrees.text() + "; memory is that of one rank");
  }
  table.row("batch", fmt::format("{} rows of {} = {} tokens a step, {} micro-batch{}", sizes.global,
                                 config.training.seq_len,
                                 with_commas(sizes.global * config.training.seq_len),
                                 sizes.micro_batches(), sizes.micro_batches() == 1 ? "" : "es"));
  table.row("attention",
            fmt::format("MLA {}; indexer: {}", config.model.mla_form, indexer_text(config, model)));
  table.row("experts", moe_text(config, shape));
  table.row("mtp", shape.num_nextn_predict_layers == 0
                       ? "off"
                       : fmt::format("{} modules, weight {}", shape.num_nextn_predict_layers,
                                     config.mtp.loss_weight));
  table.row("activations", activations_text(settings.recompute));
  table.row("checkpoints", config.checkpoint.enable
                               ? fmt::format("every {} steps, keep {}", config.checkpoint.interval,
                                             config.checkpoint.keep_latest_k)
                               : "off");
  for (const auto& note : notes(config)) table.row("note", note.line());
  return table.text();
}

}  // namespace longhaul::train
