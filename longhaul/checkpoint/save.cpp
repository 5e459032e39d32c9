#include <algorithm>
#include <cerrno>

#include "longhaul/base/fault.h"
#include "longhaul/base/text.h"
#include "longhaul/checkpoint/checkpoint.h"
#include "longhaul/checkpoint/manifest.h"
#include "longhaul/checkpoint/save_plan.h"
#include "longhaul/checkpoint/shard_writer.h"
#include "longhaul/checkpoint/step_folder.h"
#include "longhaul/dtensor/exchange.h"

namespace longhaul::checkpoint {
namespace {

using dtensor::Communicator;

// The values on the host, in `place` if they fit there.
at::Tensor copied(const at::Tensor& tensor, const at::Tensor& place, bool pin_memory) {
  const at::NoGradGuard no_grad;
  const bool fits = place.defined() && place.sizes() == tensor.sizes() &&
                    place.scalar_type() == tensor.scalar_type();
  if (fits) return at::Tensor(place).copy_(tensor);
  const bool pinned = pin_memory && at::globalContext().hasCUDA();
  return at::empty(tensor.sizes(),
                   at::device(at::kCPU).dtype(tensor.scalar_type()).pinned_memory(pinned))
      .copy_(tensor);
}

int own_rank(const SaveOptions& options) {
  return options.ranks == nullptr ? 0 : options.ranks->rank();
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

// One save: steps in which all ranks go along, each of which fails on all of them or on none.
class Save {
 public:
  Save(const fs::path& folder, const Snapshot& snapshot, Contents contents, bool shapes_only,
       const SaveOptions& options)
      : folder_(folder),
        snapshot_(snapshot),
        contents_(std::move(contents)),
        options_(options),
        ranks_(options.ranks),
        rank_(own_rank(options)),
        shards_(plan_shards(snapshot.tensors, shapes_only, options)) {}

  fs::path run();

 private:
  std::string prepare(const fs::path& target);
  std::string write() const;
  void publish(const std::vector<std::string>& parts);
  std::vector<std::string> together(const std::function<std::string()>& step);
  std::string told_of_full_disk(const std::function<std::string()>& step) const;
  [[noreturn]] void fail_full_disk(const FileError& error) const;

  const fs::path& folder_;
  const Snapshot& snapshot_;
  const Contents contents_;
  const SaveOptions& options_;
  const Communicator* ranks_;
  const int rank_;
  const std::vector<Shard> shards_;
  fs::path place_;                            // the step folder that is being prepared
  std::optional<TemporaryFolder> temporary_;  // of rank 0
};

fs::path Save::run() {
  check_snapshot(snapshot_);
  const fs::path target = step_path(folder_, snapshot_.step);
  place_ = together([&] { return rank_ == 0 ? prepare(target) : ""; })[0];
  const auto parts = together([&] { return write(); });
  together([&] {
    if (rank_ == 0) publish(parts);
    return "";
  });
  together([&] {
    fault::at("checkpoint.done");
    return "";
  });
  return target;
}

std::vector<std::string> Save::together(const std::function<std::string()>& step) {
  try {
    auto results = dtensor::together(ranks_, [&] { return told_of_full_disk(step); });
    if (options_.progress) options_.progress();
    return results;
  } catch (const dtensor::CollectiveError&) {
    if (temporary_) temporary_->leave();
    throw;
  }
}

// A full disk is told with what is missing.
std::string Save::told_of_full_disk(const std::function<std::string()>& step) const {
  try {
    return step();
  } catch (const FileError& error) {
    if (error.code() == ENOSPC || error.code() == EDQUOT) fail_full_disk(error);
    throw;
  }
}

void Save::fail_full_disk(const FileError& error) const {
  const int64_t needed = total_bytes(shards_);
  const int64_t left = std::max<int64_t>(0, available_bytes(folder_));
  const auto size = [](int64_t bytes) { return human_bytes(static_cast<double>(bytes)); };
  throw FileError(
      error.code(),
      fmt::format("cannot save step {} in '{}': no space left on device; it takes {} and {} are "
                  "left: free {} or choose another checkpoint.folder",
                  snapshot_.step, folder_.string(), size(needed), size(left),
                  size(needed > left ? needed - left : needed)));
}

// Returns the path of the folder that all write to.
std::string Save::prepare(const fs::path& target) {
  check_replacement(target, snapshot_);
  remove_stale(folder_, [](const std::string& name) { return step_of(name) >= 0; });
  temporary_.emplace(target);
  fault::at("checkpoint.begin");
  return temporary_->path().string();
}

// Returns this rank's part of the manifest.
std::string Save::write() const {
  Manifest part = write_shards(shards_, contents_,
                               {.folder = place_,
                                .metadata = {{"step", std::to_string(snapshot_.step)}},
                                .fault_place = "checkpoint",
                                .ranks = ranks_,
                                .progress = [this](int64_t) {
                                  if (options_.progress) options_.progress();
                                }});
  part.step = snapshot_.step;
  return encode_manifest(part);
}

void Save::publish(const std::vector<std::string>& parts) {
  Manifest whole;
  whole.step = snapshot_.step;
  whole.model_only = snapshot_.model_only;
  whole.trainer = snapshot_.trainer;
  for (const auto& text : parts) {
    Manifest part = decode_manifest(text, "the ranks' part of the manifest");
    whole.tensors.merge(part.tensors);
    whole.files.merge(part.files);
  }
  const std::string text = encode_manifest(whole);
  fault::at("checkpoint.manifest");
  FileWriter writer(place_ / kManifestName);
  writer.write(text);
  writer.finish();
  fault::at("checkpoint.rename");
  temporary_->publish();
  fault::at("checkpoint.renamed");
}

}  // namespace

fs::path step_path(const fs::path& folder, int64_t step) {
  return folder / fmt::format("step-{}", step);
}

fs::path save(const fs::path& folder, const Snapshot& snapshot, const SaveOptions& options) {
  const bool fetches = snapshot.fetch != nullptr;
  const auto of = [&](const safetensors::TensorInfo& info) {
    return fetches ? snapshot.fetch(info.name) : snapshot.tensors.at(info.name);
  };
  return Save(folder, snapshot, {.of = of, .fetched = fetches}, fetches, options).run();
}

fs::path save(const fs::path& folder, const StagedSnapshot& staged, const SaveOptions& options) {
  const auto of = [&](const safetensors::TensorInfo& info) {
    return staged.contents.at(info.name);
  };
  return Save(folder, staged.snapshot, {.of = of}, /*shapes_only=*/true, options).run();
}

StagedSnapshot stage(const Snapshot& snapshot, const SaveOptions& options, TensorMap reused) {
  const bool fetches = snapshot.fetch != nullptr;
  StagedSnapshot staged{.snapshot = {.step = snapshot.step,
                                     .model_only = snapshot.model_only,
                                     .tensors = {},
                                     .fetch = {},
                                     .trainer = snapshot.trainer},
                        .contents = {}};
  for (const auto& [name, tensor] : snapshot.tensors) {
    staged.snapshot.tensors[name] = at::empty(tensor.sizes(), tensor.options().device(at::kMeta));
  }
  for (const Shard& shard : plan_shards(snapshot.tensors, fetches, options)) {
    for (const auto& info : shard.tensors) {
      const bool own = shard.writer == own_rank(options);
      if (!own && !fetches) break;
      const at::Tensor contents =
          fetches ? snapshot.fetch(info.name) : snapshot.tensors.at(info.name);
      if (own) staged.contents[info.name] = copied(contents, reused[info.name], options.pin_memory);
    }
  }
  return staged;
}

}  // namespace longhaul::checkpoint
