#include "longhaul/train/preflight.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <filesystem>

#include "longhaul/base/error.h"
#include "longhaul/base/system.h"
#include "longhaul/base/text.h"
#include "longhaul/config/capability.h"
#include "longhaul/config/degrees.h"
#include "longhaul/converters/converters.h"
#include "longhaul/models/deepseek_v3/flops.h"
#include "longhaul/models/deepseek_v3/model.h"
#include "longhaul/ops/cpu/isa.h"
#include "longhaul/optim/adam_w.h"
#include "longhaul/parallel/context.h"
#include "longhaul/parallel/expert.h"
#include "longhaul/parallel/plans/deepseek_v3.h"
#include "longhaul/train/device.h"
#include "longhaul/train/hf_export.h"
#include "longhaul/train/resume.h"
#include "longhaul/train/setup.h"

namespace longhaul::train {
namespace {

void check_memory(const JobConfig& config, const ResolvedModel& resolved, int64_t pieces,
                  int64_t ranks_here) {
  const at::Device device = choose_device(config);
  if (!device.is_cpu()) return;
  const auto settings = model_settings(config, device);
  const auto parameters = deepseek_v3::count_parameters(resolved.shape, settings).total;
  // In the dense warm-up only the indexer has gradients and moments.
  const bool trunk_learns = settings.stage != deepseek_v3::IndexerStage::kDenseWarmup;
  const int64_t saved = trunk_learns ? 3 : 1;  // weights and moments
  const bool copies = saves(config) && config.checkpoint.async_mode != "disabled";
  const int64_t times = saved + (trunk_learns ? 1 : 0) + (copies ? saved : 0);
  const int64_t needed =
      parameters * static_cast<int64_t>(c10::elementSize(settings.param_dtype)) * times / pieces;
  if (needed * ranks_here <= machine_memory_bytes()) return;
  std::string sharing;
  if (ranks_here > 1) {
    sharing = fmt::format(" on each of {} ranks here", ranks_here);
  } else if (pieces > 1) {
    sharing = fmt::format(" on each of {} ranks", pieces);
  }
  fail_setting(
      config, "model.flavor",
      fmt::format(
          "{} parameters in {} take {} for weights{}{}{}, activations not counted; this machine "
          "has {}; take a smaller model.flavor",
          with_commas(parameters), config.training.dtype, human_bytes(static_cast<double>(needed)),
          trunk_learns ? ", gradients and moments" : "",
          copies ? " and the copy for checkpoint.async_mode" : "", sharing,
          human_bytes(static_cast<double>(machine_memory_bytes()))));
}

void check_initial_weights(const JobConfig& config) {
  const auto& path = config.checkpoint.initial_load_path;
  if (!config.checkpoint.enable || !path || std::filesystem::exists(*path)) return;
  fail_setting(config, "checkpoint.initial_load_path", fmt::format("'{}' does not exist", *path));
}

// Found at the end, it would cost the last save.
void check_export(const JobConfig& config) {
  if (!saves(config) || !config.checkpoint.last_save_in_hf) return;
  name_setting(config, "model.hf_assets_path", [&] { check_assets(config.model.hf_assets_path); });
}

// The names are known without a single number: on the Meta device a model is only shapes.
void check_no_decay(const JobConfig& config, const ResolvedModel& resolved) {
  if (config.optimizer.no_decay.empty()) return;
  deepseek_v3::Model model(resolved.shape, model_settings(config, at::kMeta));
  name_setting(config, "optimizer.no_decay",
               [&] { return optim::AdamW(model.parameters(), adam_w_config(config)); });
}

// A name that was given must be that of a product: the default's may be of a part that the model
// has not.
void check_recomputed_products(const JobConfig& config, const ResolvedModel& resolved) {
  const char* key = "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns";
  const auto settings = model_settings(config, at::kMeta);
  if (config.origin_of(key).kind == Origin::Kind::kDefault) return;
  const deepseek_v3::Model model(resolved.shape, settings);
  for (const auto& name : settings.recompute.unsaved_linears) {
    if (!deepseek_v3::block_linears(model, name).empty()) continue;
    std::vector<std::string> known;  // without "model.layers.N." and ".weight"
    for (const auto& parameter : deepseek_v3::block_linears(model, "layers")) {
      const size_t layer = std::string("model.layers.").size();
      const size_t begin = parameter.name.find('.', layer) + 1;
      known.push_back(parameter.name.substr(begin, parameter.name.rfind('.') - begin));
    }
    fail_setting(
        config, key,
        fmt::format("no block has a product called '{}'{}", name, did_you_mean(name, known)));
  }
}

}  // namespace

void check_converters(const JobConfig& config, const deepseek_v3::ModelConfig& shape) {
  name_setting(config, "model.converters", [&] {
    converters::check(config.model.converters, converter_properties(config, shape));
  });
}

void check_parallelism(const JobConfig& config, const ResolvedModel& resolved,
                       const Degrees& degrees) {
  parallel::check_context_parallel(config, degrees.cp);
  parallel::check_expert_parallel(resolved.shape, degrees.ep);
  parallel::check_tensor_parallel(resolved.shape, degrees.tp);
}

void check_job(const JobConfig& config, int64_t ranks) {
  refuse_missing_behaviour(config, ranks);
  const Degrees degrees = resolve_degrees(config, ranks);
  const ResolvedModel resolved = resolve_model(config);
  check_converters(config, resolved.shape);
  check_parallelism(config, resolved, degrees);
  check_no_decay(config, resolved);
  check_recomputed_products(config, resolved);
}

void check_kernels() { cpu::chosen_isa(); }

void check_machine(const JobConfig& config, const ResolvedModel& resolved, int64_t pieces,
                   int64_t ranks_here) {
  check_kernels();
  check_no_decay(config, resolved);
  check_recomputed_products(config, resolved);
  check_memory(config, resolved, pieces, ranks_here);
  check_initial_weights(config);
  check_export(config);
}

}  // namespace longhaul::train
