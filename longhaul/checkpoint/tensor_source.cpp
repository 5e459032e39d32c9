#include "longhaul/checkpoint/tensor_source.h"

#include "longhaul/checkpoint/checkpoint_reader.h"
#include "longhaul/checkpoint/hf_reader.h"
#include "longhaul/checkpoint/locate.h"

namespace longhaul::checkpoint {

Located locate(const fs::path& path) {
  if (!fs::exists(path)) fail_user("'{}' does not exist; check the path", path.string());
  if (!fs::is_directory(path)) return {path, false};
  if (fs::exists(path / kManifestName)) return {path, true};
  if (fs::exists(path / "model.safetensors") || fs::exists(path / "model.safetensors.index.json")) {
    return {path, false};
  }
  const auto steps = list_steps(path);
  if (!steps.empty()) return {steps.front().path, true};
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
