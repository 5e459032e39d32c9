#include "longhaul/checkpoint/tensor_source.h"

#include "longhaul/base/log.h"
#include "longhaul/checkpoint/checkpoint_reader.h"
#include "longhaul/checkpoint/hf_reader.h"
#include "longhaul/checkpoint/locate.h"

namespace longhaul::checkpoint {
namespace {

// The newest that is what its name says; what is damaged counts as that, and whoever opens it says
// so. If there is none, the one with the highest number.
fs::path newest_of(const std::vector<StepFolder>& steps) {
  for (const StepFolder& step : steps) {
    try {
      const std::string why = misnamed(read_manifest(step.path), step.step);
      if (why.empty()) return step.path;
      log::warn("passing over checkpoint '{}': {}", step.path.string(), why);
    } catch (const UserError&) {
      return step.path;
    }
  }
  return steps.front().path;
}

}  // namespace

Located locate(const fs::path& path) {
  if (!fs::exists(path)) fail_user("'{}' does not exist; check the path", path.string());
  if (!fs::is_directory(path)) return {path, false};
  if (fs::exists(path / kManifestName)) return {path, true};
  if (fs::exists(path / "model.safetensors") || fs::exists(path / "model.safetensors.index.json")) {
    return {path, false};
  }
  const auto steps = list_steps(path);
  if (!steps.empty()) return {newest_of(steps), true};
  fail_user(
      "'{}' is no checkpoint: it holds neither {} nor model.safetensors nor a step-N folder; name "
      "a folder that does",
      path.string(), kManifestName);
}

std::unique_ptr<TensorSource> open_source(const fs::path& path) {
  const Located located = locate(path);
  if (located.ours) return std::make_unique<CheckpointReader>(located.path);
  return std::make_unique<HfReader>(located.path);
}

}  // namespace longhaul::checkpoint
