#include <algorithm>
#include <charconv>
#include <sstream>

#include "longhaul/base/log.h"
#include "longhaul/checkpoint/checkpoint.h"
#include "longhaul/checkpoint/checkpoint_reader.h"
#include "longhaul/checkpoint/step_folder.h"
#include "longhaul/dtensor/exchange.h"

namespace longhaul::checkpoint {
namespace {

using dtensor::Communicator;

constexpr std::string_view kExportSuffix = "-hf";

// What a checkpoint is wanted for.
enum class Need { kResume, kWeights };

// How closely a checkpoint is looked at: whether its files are there, also what their headers say,
// or every byte.
enum class Look { kFiles, kHeaders, kContents };

// A question that the first rank looks into for all of them. Collective.
std::string ask_first(const Communicator* ranks, const std::function<std::string()>& question) {
  const bool is_first = ranks == nullptr || ranks->rank() == 0;
  return dtensor::together(ranks, [&] { return is_first ? question() : ""; })[0];
}

// As the first rank sees them.
std::vector<StepFolder> list_together(const fs::path& folder, const Communicator* ranks) {
  const std::string numbers = ask_first(ranks, [&] {
    std::string text;
    for (const StepFolder& step : list_steps(folder)) text += std::to_string(step.step) + " ";
    return text;
  });
  std::vector<StepFolder> steps;
  std::istringstream in(numbers);
  for (int64_t step = 0; in >> step;) steps.push_back({step, step_path(folder, step)});
  return steps;
}

// Why the checkpoint is of no use without a look at its contents, or empty.
std::string why_unfit(const StepFolder& step, Need need, Look look) {
  try {
    const Manifest manifest = read_manifest(step.path);
    if (std::string why = misnamed(manifest, step.step); !why.empty()) return why;
    if (need == Need::kResume && manifest.model_only) {
      return "it holds the model only, without the optimizer";
    }
    if (look == Look::kHeaders) {
      const CheckpointReader reader(step.path);
      return "";
    }
    const auto problems = find_missing(step.path, manifest);
    return problems.empty() ? "" : problems.front();
  } catch (const UserError& error) {
    return error.what();
  }
}

// Why the checkpoint is of no use, or empty.
std::string why_unusable(const StepFolder& step, Need need, Look look, const Communicator* ranks) {
  std::string reason = ask_first(ranks, [&] { return why_unfit(step, need, look); });
  if (!reason.empty() || look != Look::kContents) return reason;
  try {
    verify_together(step.path, ranks);
    return "";
  } catch (const UserError& error) {
    return error.what();
  }
}

fs::path find_exactly(const fs::path& folder, int64_t load_step, Look look,
                      const Communicator* ranks) {
  std::vector<std::string> known;
  for (const StepFolder& step : list_together(folder, ranks)) {
    if (step.step != load_step) {
      known.push_back(std::to_string(step.step));
      continue;
    }
    const std::string reason = why_unusable(step, Need::kResume, look, ranks);
    if (reason.empty()) return step.path;
    fail_user("'{}' cannot be resumed from: {}", step.path.string(), reason);
  }
  fail_user("'{}' does not exist; there {}: {}", step_path(folder, load_step).string(),
            known.size() == 1 ? "is" : "are",
            known.empty() ? "none" : fmt::format("{}", fmt::join(known, ", ")));
}

std::optional<fs::path> find_newest(const fs::path& folder, Need need, Look look,
                                    const Communicator* ranks) {
  std::optional<fs::path> found;
  const auto steps = list_together(folder, ranks);
  for (const StepFolder& step : steps) {
    // Older ones are looked at only briefly: a damaged one is worth a line, not minutes.
    const std::string reason = why_unusable(step, need, found ? Look::kFiles : look, ranks);
    if (!reason.empty()) {
      log::warn("passing over checkpoint '{}': {}", step.path.string(), reason);
    } else if (!found) {
      found = step.path;
    }
  }
  if (!found && !steps.empty()) {
    log::warn("none of the {} checkpoints in '{}' can be {}", steps.size(), folder.string(),
              need == Need::kResume ? "resumed from" : "read");
  }
  return found;
}

// Whether the folder holds the full checkpoint that its name says, and so may be purged.
struct Fullness {
  bool full = false;
  bool complete = false;  // all its files are there
};

Fullness fullness_of(const StepFolder& step) {
  try {
    const Manifest manifest = read_manifest(step.path);
    return {.full = !manifest.model_only && manifest.step == step.step,
            .complete = find_missing(step.path, manifest).empty()};
  } catch (const UserError&) {
    return {};
  }
}

// A folder that resists is no reason to lose what was saved.
void remove_or_warn(const fs::path& step_folder) {
  try {
    remove_step(step_folder);
  } catch (const std::exception& error) {
    log::warn("the old checkpoint '{}' is not deleted: {}", step_folder.string(), error.what());
  }
}

}  // namespace

int64_t step_of(const std::string& name) {
  constexpr std::string_view kPrefix = "step-";
  if (!name.starts_with(kPrefix)) return -1;
  const std::string_view digits = std::string_view(name).substr(kPrefix.size());
  if (digits.empty() || (digits.size() > 1 && digits[0] == '0')) return -1;
  int64_t step = -1;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), step);
  return error == std::errc() && end == digits.data() + digits.size() ? step : -1;
}

int64_t step_of_export(const std::string& name) {
  if (!name.ends_with(kExportSuffix)) return -1;
  return step_of(name.substr(0, name.size() - kExportSuffix.size()));
}

fs::path step_path(const fs::path& folder, int64_t step) {
  return folder / fmt::format("step-{}", step);
}

fs::path export_path(const fs::path& folder, int64_t step) {
  return step_path(folder, step).string() + std::string(kExportSuffix);
}

std::vector<StepFolder> list_steps(const fs::path& folder) {
  std::vector<StepFolder> steps;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    const int64_t step = step_of(entry.path().filename().string());
    if (step >= 0 && entry.is_directory(error)) steps.push_back({step, entry.path()});
  }
  if (error && error != std::errc::no_such_file_or_directory) {
    fail_file("read the folder", folder, error.value());
  }
  std::sort(steps.begin(), steps.end(),
            [](const StepFolder& a, const StepFolder& b) { return a.step > b.step; });
  return steps;
}

Snapshot load(const fs::path& step_folder, bool verify) {
  const CheckpointReader reader(step_folder);
  Snapshot snapshot;
  snapshot.step = reader.manifest().step;
  snapshot.model_only = reader.manifest().model_only;
  snapshot.trainer = reader.manifest().trainer;
  if (verify) {
    snapshot.tensors = reader.load_verified();
  } else {
    for (const auto& name : reader.names()) snapshot.tensors.emplace(name, reader.load(name));
  }
  return snapshot;
}

std::optional<fs::path> find_resumable(const fs::path& folder, int64_t load_step, bool verify,
                                       const Communicator* ranks) {
  LONGHAUL_CHECK(load_step >= -1, "load_step {} is neither -1 nor a step", load_step);
  const Look look = verify ? Look::kContents : Look::kHeaders;
  if (load_step >= 0) return find_exactly(folder, load_step, look, ranks);
  return find_newest(folder, Need::kResume, look, ranks);
}

std::optional<fs::path> find_weights(const fs::path& folder, bool verify,
                                     const Communicator* ranks) {
  return find_newest(folder, Need::kWeights, verify ? Look::kContents : Look::kHeaders, ranks);
}

std::set<int64_t> find_later_steps(const fs::path& folder, int64_t step) {
  std::set<int64_t> later;
  for (const StepFolder& found : list_steps(folder)) {
    if (found.step > step && fullness_of(found).full) later.insert(found.step);
  }
  return later;
}

void purge(const fs::path& folder, const PurgeOptions& options) {
  LONGHAUL_CHECK(options.keep_latest_k >= 0, "keep_latest_k is {}", options.keep_latest_k);
  if (options.keep_latest_k == 0) return;
  int kept = 0;
  for (const StepFolder& step : list_steps(folder)) {
    if (step.step > options.saved_step || options.others.contains(step.step)) continue;
    const auto [full, complete] = fullness_of(step);
    if (!full) continue;
    if (kept == options.keep_latest_k) {
      if (options.progress) options.progress();
      remove_or_warn(step.path);
    } else if (complete) {
      ++kept;
    }
  }
}

}  // namespace longhaul::checkpoint
