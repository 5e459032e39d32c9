#include "longhaul/train/trained_model.h"

#include <filesystem>

#include "longhaul/base/error.h"
#include "longhaul/checkpoint/checkpoint.h"
#include "longhaul/checkpoint/checkpoint_reader.h"
#include "longhaul/checkpoint/locate.h"
#include "longhaul/train/device.h"
#include "longhaul/train/hf_import.h"
#include "longhaul/train/preflight.h"
#include "longhaul/train/setup.h"
#include "longhaul/train/trainer.h"

namespace longhaul::train {
namespace {

namespace fs = std::filesystem;

struct Weights {
  checkpoint::Located place;
  bool verified = false;
};

// Of a folder of steps the newest sound one. If none is, the newest: loading it says what is wrong.
Weights find(const fs::path& path) {
  Weights weights{checkpoint::locate(path)};
  if (!weights.place.ours || weights.place.path == path) return weights;
  if (const auto found = checkpoint::find_weights(path)) weights = {{*found, true}, true};
  return weights;
}

}  // namespace

TrainedModel load_trained_model(const JobConfig& config, const std::string& checkpoint) {
  const fs::path folder = fs::path(config.job.dump_folder) / config.checkpoint.folder;
  if (checkpoint.empty() && checkpoint::list_steps(folder).empty()) {
    fail_user(
        "no checkpoint in '{}'; train first with checkpoint.enable = true, or name one with "
        "--checkpoint",
        folder.string());
  }
  check_kernels();
  const auto [place, verified] = find(checkpoint.empty() ? folder : fs::path(checkpoint));
  const auto settings = model_settings(config, choose_device(config));
  const auto shape = resolve_model(config).shape;
  TrainedModel trained{std::make_unique<deepseek_v3::Model>(shape, settings), place.path.string()};
  apply_converters(config, *trained.model);
  if (place.ours) {
    const checkpoint::CheckpointReader reader(place.path);
    if (!verified) reader.verify();
    load_model_tensors(*trained.model, reader, trained.source);
  } else {
    load_hf_folder(*trained.model, trained.source, {.quantized = true});
  }
  return trained;
}

TrainedModel untrained_model(const JobConfig& config) {
  check_kernels();
  const ResolvedModel resolved = resolve_model(config);
  TrainedModel untrained{build_model(config, resolved, choose_device(config)), "untrained"};
  initialize_model(*untrained.model, config, resolved);
  return untrained;
}

}  // namespace longhaul::train
