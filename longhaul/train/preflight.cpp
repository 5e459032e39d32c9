#include "longhaul/train/preflight.h"

#include <ATen/ATen.h>

#include <filesystem>

#include "longhaul/base/error.h"
#include "longhaul/base/system.h"
#include "longhaul/base/text.h"
#include "longhaul/converters/converters.h"
#include "longhaul/models/deepseek_v3/flops.h"
#include "longhaul/train/device.h"
#include "longhaul/train/setup.h"

namespace longhaul::train {
namespace {

std::string place(const JobConfig& config, const std::string& key) {
  return config.origin_of(key).text() + ": " + key;
}

void check_memory(const JobConfig& config, const ResolvedModel& resolved) {
  const at::Device device = choose_device(config.training.device);
  if (!device.is_cpu()) return;
  const auto settings = model_settings(config, device);
  const auto parameters = deepseek_v3::count_parameters(resolved.shape, settings).total;
  // In the dense warm-up only the indexer has gradients and moments.
  const bool trunk_learns = settings.stage != deepseek_v3::IndexerStage::kDenseWarmup;
  const int64_t needed = parameters * static_cast<int64_t>(c10::elementSize(settings.param_dtype)) *
                         (trunk_learns ? 4 : 1);
  if (needed <= machine_memory_bytes()) return;
  fail_user(
      "{}: {} parameters in {} take {} for weights{}, activations not counted; this machine has "
      "{}; "
      "take a smaller model.flavor",
      place(config, "model.flavor"), with_commas(parameters), config.training.dtype,
      human_bytes(static_cast<double>(needed)), trunk_learns ? ", gradients and moments" : "",
      human_bytes(static_cast<double>(machine_memory_bytes())));
}

void check_initial_weights(const JobConfig& config) {
  const auto& path = config.checkpoint.initial_load_path;
  if (!config.checkpoint.enable || !path || std::filesystem::exists(*path)) return;
  fail_user("{}: '{}' does not exist", place(config, "checkpoint.initial_load_path"), *path);
}

}  // namespace

void check_converters(const JobConfig& config) {
  try {
    converters::check(config.model.converters, converter_properties(config));
  } catch (const UserError& error) {
    fail_user("{}: {}", place(config, "model.converters"), error.what());
  }
}

void check_machine(const JobConfig& config, const ResolvedModel& resolved) {
  check_memory(config, resolved);
  check_initial_weights(config);
}

}  // namespace longhaul::train
