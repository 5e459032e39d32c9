#include <fmt/ranges.h>

#include <algorithm>
#include <cerrno>

#include "longhaul/base/fault.h"
#include "longhaul/base/text.h"
#include "longhaul/checkpoint/checkpoint.h"
#include "longhaul/checkpoint/manifest.h"
#include "longhaul/checkpoint/step_folder.h"

namespace longhaul::checkpoint {
namespace {

// A file to be written.
struct Shard {
  std::string file;
  std::vector<safetensors::TensorInfo> tensors;
  int64_t bytes = 0;
};

int64_t bytes_of(const safetensors::TensorInfo& info) {
  return safetensors::tensor_bytes(info.dtype, info.shape, "tensor '" + info.name + "'");
}

// Cuts the tensors of one group, in the order of their names, into shards.
void plan_group(const TensorMap& tensors, bool shapes_only, bool optimizer, int64_t max_bytes,
                std::vector<Shard>& shards) {
  int number = 0;
  bool open = false;
  for (const auto& [name, tensor] : tensors) {
    if (name.starts_with(kOptimizerPrefix) != optimizer) continue;
    const auto info = shapes_only ? describe_shape(name, tensor) : describe(name, tensor);
    const int64_t bytes = bytes_of(info);
    if (!open || shards.back().bytes + bytes > max_bytes) {
      const char* group = optimizer ? "optimizer" : "model";
      shards.push_back({fmt::format("{}-{:05}.safetensors", group, ++number), {}, 0});
      open = true;
    }
    shards.back().tensors.push_back(info);
    shards.back().bytes += bytes;
  }
}

std::vector<Shard> plan_shards(const Snapshot& snapshot, int64_t max_bytes) {
  const bool shapes_only = snapshot.fetch != nullptr;
  std::vector<Shard> shards;
  plan_group(snapshot.tensors, shapes_only, /*optimizer=*/false, max_bytes, shards);
  plan_group(snapshot.tensors, shapes_only, /*optimizer=*/true, max_bytes, shards);
  for (Shard& shard : shards) safetensors::order_for_writing(shard.tensors);
  return shards;
}

void write_shard(const fs::path& folder, const Shard& shard, const Snapshot& snapshot,
                 Manifest& manifest) {
  safetensors::Writer writer(folder / shard.file, shard.tensors,
                             {{"step", std::to_string(snapshot.step)}});
  for (const auto& info : writer.tensors()) {
    fault::at("checkpoint.tensor");
    const at::Tensor host =
        on_host(snapshot.fetch ? snapshot.fetch(info.name) : snapshot.tensors.at(info.name));
    LONGHAUL_CHECK(host.sizes() == at::IntArrayRef(info.shape) &&
                       host.scalar_type() == to_scalar_type(info.dtype),
                   "'{}' is {} [{}], planned was {} [{}]", info.name,
                   c10::toString(host.scalar_type()), fmt::join(host.sizes(), ", "),
                   safetensors::dtype_name(info.dtype), fmt::join(info.shape, ", "));
    const auto bytes = static_cast<size_t>(info.bytes());
    writer.write(info.name, host.const_data_ptr(), bytes);
    manifest.tensors[info.name] = {
        info.dtype,
        info.shape,
        hash_hex(host.const_data_ptr(), bytes),
        {shard.file, writer.data_start() + info.begin, writer.data_start() + info.end}};
  }
  writer.finish();
  manifest.files[shard.file] = {writer.file_bytes(), writer.file_hash()};
  fault::at("checkpoint.shard");
}

void write_manifest(const fs::path& folder, const Manifest& manifest) {
  const std::string text = encode_manifest(manifest);
  fault::at("checkpoint.manifest");
  FileWriter writer(folder / kManifestName);
  writer.write(text);
  writer.finish();
}

void check_snapshot(const Snapshot& snapshot) {
  LONGHAUL_CHECK(snapshot.step >= 0, "step {} cannot be saved", snapshot.step);
  LONGHAUL_CHECK(snapshot.trainer.is_object(), "the trainer's state is no JSON object but {}",
                 snapshot.trainer.type_name());
  if (!snapshot.model_only) return;
  for (const auto& [name, tensor] : snapshot.tensors) {
    LONGHAUL_CHECK(!name.starts_with(kOptimizerPrefix),
                   "a model-only checkpoint of step {} was given '{}'", snapshot.step, name);
  }
}

void check_replacement(const fs::path& target, const Snapshot& snapshot) {
  std::error_code ignored;
  if (!snapshot.model_only || !fs::exists(target / kManifestName, ignored)) return;
  bool full = false;
  try {
    full = !read_manifest(target).model_only;
  } catch (const UserError&) {
    return;
  }
  if (full) {
    fail_user(
        "'{}' is a full checkpoint, a model-only one would replace it: move it or choose "
        "another checkpoint.folder",
        target.string());
  }
}

void write_step(const fs::path& folder, const Snapshot& snapshot,
                const std::vector<Shard>& shards) {
  TemporaryStep temporary(folder, snapshot.step);
  fault::at("checkpoint.begin");
  Manifest manifest;
  manifest.step = snapshot.step;
  manifest.model_only = snapshot.model_only;
  manifest.trainer = snapshot.trainer;
  for (const Shard& shard : shards) write_shard(temporary.path(), shard, snapshot, manifest);
  write_manifest(temporary.path(), manifest);
  sync_folder(temporary.path());
  temporary.publish();
}

[[noreturn]] void fail_full_disk(const fs::path& folder, const Snapshot& snapshot,
                                 const std::vector<Shard>& shards, const FileError& error) {
  int64_t needed = 0;
  for (const Shard& shard : shards) needed += shard.bytes;
  const int64_t left = std::max<int64_t>(0, available_bytes(folder));
  const int64_t short_of = needed > left ? needed - left : needed;
  throw FileError(
      error.code(),
      fmt::format("cannot save step {} in '{}': no space left on device; it takes {} and {} are "
                  "left: free {} or choose another checkpoint.folder",
                  snapshot.step, folder.string(), human_bytes(static_cast<double>(needed)),
                  human_bytes(static_cast<double>(left)),
                  human_bytes(static_cast<double>(short_of))));
}

}  // namespace

fs::path step_path(const fs::path& folder, int64_t step) {
  return folder / fmt::format("step-{}", step);
}

void fetch_for_save(const Snapshot& snapshot, const SaveOptions& options) {
  for (const Shard& shard : plan_shards(snapshot, options.max_shard_bytes)) {
    for (const auto& info : shard.tensors) snapshot.fetch(info.name);
  }
}

fs::path save(const fs::path& folder, const Snapshot& snapshot, const SaveOptions& options) {
  check_snapshot(snapshot);
  const auto shards = plan_shards(snapshot, options.max_shard_bytes);
  const fs::path target = step_path(folder, snapshot.step);
  check_replacement(target, snapshot);
  create_folders(folder);
  remove_stale(folder);
  try {
    write_step(folder, snapshot, shards);
  } catch (const FileError& error) {
    if (error.code() != ENOSPC && error.code() != EDQUOT) throw;
    fail_full_disk(folder, snapshot, shards, error);
  }
  fault::at("checkpoint.done");
  return target;
}

}  // namespace longhaul::checkpoint
