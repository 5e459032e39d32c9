#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cerrno>

#include "longhaul/base/fault.h"
#include "longhaul/base/text.h"
#include "longhaul/checkpoint/checkpoint.h"
#include "longhaul/checkpoint/manifest.h"
#include "longhaul/checkpoint/part_gather.h"
#include "longhaul/checkpoint/save_plan.h"
#include "longhaul/checkpoint/shard_writer.h"
#include "longhaul/checkpoint/step_folder.h"
#include "longhaul/dtensor/exchange.h"

namespace longhaul::checkpoint {
namespace {

using dtensor::Communicator;

// The values on the host, in `place` if they fit there.
at::Tensor copied(const at::Tensor& tensor, at::ScalarType dtype, const at::Tensor& place,
                  bool pin_memory) {
  const at::NoGradGuard no_grad;
  const bool fits = place.defined() && place.is_cpu() && place.sizes() == tensor.sizes() &&
                    place.scalar_type() == dtype;
  if (fits) return at::Tensor(place).copy_(tensor);
  const bool pinned = pin_memory && at::globalContext().hasCUDA();
  return at::empty(tensor.sizes(), at::device(at::kCPU).dtype(dtype).pinned_memory(pinned))
      .copy_(tensor);
}

at::Tensor shape_of(const at::Tensor& tensor) {
  return at::empty(tensor.sizes(), tensor.options().device(at::kMeta));
}

TensorMap shapes_of(const Snapshot& snapshot) {
  TensorMap shapes;
  for (const auto& [name, tensor] : snapshot.tensors) shapes[name] = shape_of(tensor);
  return shapes;
}

bool has_parts(const Snapshot& snapshot) { return !snapshot.parts.empty(); }

// Collective, unless stage() has made it.
std::shared_ptr<const PartPlan> plan_of(const Snapshot& snapshot, const Communicator& ranks) {
  return snapshot.plan ? snapshot.plan : std::make_shared<const PartPlan>(snapshot, ranks);
}

int own_rank(const SaveOptions& options) {
  return options.ranks == nullptr ? 0 : options.ranks->rank();
}

void check_snapshot(const Snapshot& snapshot, const SaveOptions& options) {
  LONGHAUL_CHECK(!has_parts(snapshot) || options.ranks != nullptr,
                 "step {}: parts are put together by ranks, and there are none", snapshot.step);
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
  Save(const fs::path& folder, const Snapshot& snapshot, const SaveOptions& options)
      : folder_(folder),
        snapshot_(snapshot),
        options_(options),
        ranks_(options.ranks),
        rank_(own_rank(options)),
        shards_(plan_shards(snapshot, options)) {}

  fs::path run();

 private:
  std::string prepare(const fs::path& target);
  Contents contents();
  std::string write();
  void publish(const std::vector<std::string>& parts);
  std::vector<std::string> together(const std::function<std::string()>& step);
  std::string told_of_full_disk(const std::function<std::string()>& step) const;
  [[noreturn]] void fail_full_disk(const FileError& error) const;

  const fs::path& folder_;
  const Snapshot& snapshot_;
  const SaveOptions& options_;
  const Communicator* ranks_;
  const int rank_;
  const std::vector<Shard> shards_;
  fs::path place_;                            // the step folder that is being prepared
  std::shared_ptr<const PartPlan> plan_;      // where ranks hold parts
  at::Tensor gathered_;                       // what this rank writes next
  std::optional<TemporaryFolder> temporary_;  // of rank 0
};

fs::path Save::run() {
  check_snapshot(snapshot_, options_);
  const fs::path target = step_path(folder_, snapshot_.step);
  place_ = together([&] { return rank_ == 0 ? prepare(target) : ""; })[0];
  if (has_parts(snapshot_)) plan_ = plan_of(snapshot_, *ranks_);
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
  // What the manifest cannot hold is found before anything is written.
  encode_manifest({snapshot_.step, snapshot_.model_only, {}, {}, snapshot_.trainer});
  clear_stale(folder_);
  temporary_.emplace(target);
  fault::at("checkpoint.begin");
  return temporary_->path().string();
}

Contents Save::contents() {
  if (plan_) {
    return {.of = [this](const auto&) { return std::exchange(gathered_, {}); },
            .gather =
                [this](const auto& written) {
                  gathered_ = gather_parts(*plan_, snapshot_, *ranks_, written);
                }};
  }
  if (snapshot_.fetch) {
    return {.of = [this](const auto& info) { return snapshot_.fetch(info.name); }, .fetched = true};
  }
  return {.of = [this](const auto& info) { return snapshot_.tensors.at(info.name); }};
}

// Returns this rank's part of the manifest.
std::string Save::write() {
  Manifest part = write_shards(shards_, contents(),
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

fs::path save(const fs::path& folder, const Snapshot& snapshot, const SaveOptions& options) {
  return Save(folder, snapshot, options).run();
}

void clear_stale(const fs::path& folder) {
  remove_stale(folder, [](const std::string& name) {
    return step_of(name) >= 0 || step_of_export(name) >= 0;
  });
}

Snapshot stage(const Snapshot& snapshot, const SaveOptions& options, Snapshot reused) {
  check_snapshot(snapshot, options);
  Snapshot staged{.step = snapshot.step,
                  .model_only = snapshot.model_only,
                  .tensors = shapes_of(snapshot),
                  .trainer = snapshot.trainer};
  if (has_parts(snapshot)) staged.plan = plan_of(snapshot, *options.ranks);
  const int rank = own_rank(options);
  const auto copy = [&](const std::string& name, const at::Tensor& tensor,
                        const at::Tensor& place) {
    return copied(tensor, snapshot.tensors.at(name).scalar_type(), place, options.pin_memory);
  };
  const auto stage_part = [&](const std::string& name, int writer) {
    const auto& [part, offsets] = snapshot.parts.at(name);
    const bool sent = staged.plan->takes_from(rank, name, writer);
    staged.parts[name] = {sent ? copy(name, part, reused.parts[name].tensor) : shape_of(part),
                          offsets};
  };
  const auto stage_whole = [&](const std::string& name, bool own) {
    if (!own && !snapshot.fetch) return;
    const at::Tensor contents = snapshot.fetch ? snapshot.fetch(name) : snapshot.tensors.at(name);
    if (own) staged.tensors[name] = copy(name, contents, reused.tensors[name]);
  };
  for (const Shard& shard : plan_shards(snapshot, options)) {
    for (const auto& info : shard.tensors) {
      staged.plan ? stage_part(info.name, shard.writer)
                  : stage_whole(info.name, shard.writer == rank);
    }
  }
  return staged;
}

}  // namespace longhaul::checkpoint
