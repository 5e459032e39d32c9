#include "longhaul/train/resume.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <limits>

#include "longhaul/base/error.h"
#include "longhaul/base/log.h"
#include "longhaul/base/text.h"
#include "longhaul/checkpoint/checkpoint_reader.h"
#include "longhaul/checkpoint/locate.h"
#include "longhaul/config/load.h"
#include "longhaul/dtensor/exchange.h"
#include "longhaul/train/hf_export.h"

namespace longhaul::train {
namespace {

// Checkpoints of which none can be resumed from are not a reason to begin at step 1 in silence and
// to write over them. Model-only ones are: they are results, not states.
void refuse_to_start_over(const fs::path& folder) {
  for (const auto& found : checkpoint::list_steps(folder)) {
    if (fs::exists(found.path / checkpoint::kManifestName)) {
      try {
        if (checkpoint::read_manifest(found.path).model_only) continue;
      } catch (const UserError&) {
        // A damaged manifest counts as a damaged checkpoint.
      }
    }
    fail_user(
        "{}: none of the checkpoints can be resumed from (the lines above say why); repair or "
        "move them away, or choose another checkpoint.folder",
        folder.string());
  }
}

// Under a name that nothing reads or purges; returns its new path.
fs::path set_aside(const fs::path& step_folder) {
  fs::path aside = step_folder;
  for (int i = 1; fs::exists(aside); ++i) {
    aside = fmt::format("{}.abandoned-{}", step_folder.string(), i);
  }
  rename_durably(step_folder, aside);
  return aside;
}

// What the first rank does and says; its error is everybody's. Collective.
std::string on_first(const dtensor::Communicator& ranks,
                     const std::function<std::string()>& action) {
  return dtensor::together(&ranks, [&] { return ranks.rank() == 0 ? action() : ""; })[0];
}

// Of the checkpoint that a run could have ended with; empty: there is none that is complete.
std::string find_finished(const JobConfig& config, int64_t below) {
  for (const auto& found : checkpoint::list_steps(checkpoint_folder(config))) {
    if (found.step < config.training.steps || found.step >= below) continue;
    try {
      const checkpoint::CheckpointReader reader(found.path);
      const std::string why = checkpoint::misnamed(reader.manifest(), found.step);
      if (why.empty()) return std::to_string(found.step);
      log::warn("{} is passed over: {}", found.path.string(), why);
    } catch (const UserError& error) {
      log::warn("{} is passed over: {}", found.path.string(), error.what());
    }
  }
  return "";
}

// What the job that saved a checkpoint had left out itself.
Excluded excluded_when_saved(const fs::path& step_folder) {
  const std::string job = checkpoint::read_manifest(step_folder).trainer.value("job", "");
  if (job.empty()) return {};
  try {
    return excluded_from_loading(parse_job(job, step_folder.string()));
  } catch (const UserError& error) {
    log::warn(
        "the job that {} was made with is not valid in this version ({}); whether it had left out "
        "what checkpoint.exclude_from_loading names is not known, so it is left out now",
        step_folder.string(), error.what());
    return {};
  }
}

}  // namespace

fs::path checkpoint_folder(const JobConfig& config) {
  return fs::path(config.job.dump_folder) / config.checkpoint.folder;
}

bool saves(const JobConfig& config) {
  return config.checkpoint.enable && !config.checkpoint.load_only;
}

std::optional<int64_t> finished_step(const JobConfig& config, const dtensor::Communicator& ranks) {
  if (!config.checkpoint.enable || config.checkpoint.load_step >= 0) return std::nullopt;
  int64_t below = std::numeric_limits<int64_t>::max();
  while (true) {
    const std::string found = on_first(ranks, [&] { return find_finished(config, below); });
    if (found.empty()) return std::nullopt;
    below = std::stoll(found);
    if (!config.checkpoint.verify_on_load) return below;
    const fs::path path = checkpoint::step_path(checkpoint_folder(config), below);
    try {
      checkpoint::verify_together(path, &ranks);
      return below;
    } catch (const UserError& error) {
      log::warn("{} is passed over: {}", path.string(), error.what());
    }
  }
}

bool lacks_export(const JobConfig& config, int64_t step, const dtensor::Communicator& ranks) {
  if (!saves(config) || !config.checkpoint.last_save_in_hf) return false;
  const fs::path saved = checkpoint::step_path(checkpoint_folder(config), step);
  return !on_first(ranks, [&] {
            const bool full = !checkpoint::read_manifest(saved).model_only;
            return full && !fs::exists(hf_folder(config, step)) ? "yes" : "";
          }).empty();
}

std::optional<fs::path> find_resumable_step(const JobConfig& config,
                                            const dtensor::Communicator& ranks) {
  const auto& options = config.checkpoint;
  const fs::path folder = checkpoint_folder(config);
  // As in TorchTitan, load_step matters only once there is something to choose from.
  const bool any = !on_first(ranks, [&] {
                      if (saves(config)) checkpoint::clear_stale(folder);
                      return checkpoint::list_steps(folder).empty() ? "" : "some";
                    }).empty();
  if (!any && options.load_step > 0) {
    log::warn("checkpoint.load_step = {}: there are no checkpoints in {}, so the run begins anew",
              options.load_step, folder.string());
  }
  const auto find = [&] {
    return checkpoint::find_resumable(folder, options.load_step, options.verify_on_load, &ranks);
  };
  const auto found = any ? name_setting(config, "checkpoint.load_step", find) : std::nullopt;
  on_first(ranks, [&] {
    if (!found) {
      refuse_to_start_over(folder);
      if (any) {
        log::warn("{}: all checkpoints are model-only, so the run begins anew beside them",
                  folder.string());
      }
    }
    return "";
  });
  return found;
}

void abandon_later_steps(const JobConfig& config, const dtensor::Communicator& ranks) {
  const int64_t step = config.checkpoint.load_step;
  if (step < 0 || !saves(config)) return;
  on_first(ranks, [&] {
    for (const auto& found : checkpoint::list_steps(checkpoint_folder(config))) {
      if (found.step <= step) continue;
      const fs::path aside = set_aside(found.path);
      log::warn(
          "{} is after checkpoint.load_step = {}; it is now {}. Remove that key before the next "
          "start, which else goes back to step {} again",
          found.path.string(), step, aside.string(), step);
    }
    return "";
  });
}

void make_way(const JobConfig& config, int64_t step, bool model_only,
              const dtensor::Communicator& ranks) {
  const fs::path there = checkpoint::step_path(checkpoint_folder(config), step);
  on_first(ranks, [&] {
    try {
      if (checkpoint::read_manifest(there).model_only == model_only) return "";
    } catch (const UserError&) {
      return "";  // there is none, or nothing vouches for it
    }
    const std::string aside = set_aside(there).string();
    if (model_only) {
      log::warn(
          "{}, which this run has passed over, is now {}: the weights of step {} take its name",
          there.string(), aside, step);
    } else {
      log::warn(
          "{}, the weights that a run has ended with, is now {}: the state of step {} takes "
          "its name",
          there.string(), aside, step);
    }
    return "";
  });
}

Excluded excluded_from_loading(const JobConfig& config) {
  const char* key = "checkpoint.exclude_from_loading";
  const std::vector<std::string> names = {"optimizer", "dataloader", "lr_scheduler", "train_state"};
  const auto& excluded = config.checkpoint.exclude_from_loading;
  for (const auto& name : excluded) {
    if (std::find(names.begin(), names.end(), name) != names.end()) continue;
    fail_setting(config, key,
                 fmt::format("'{}' is no part of a state{}; the parts are {}", name,
                             did_you_mean(name, names), fmt::join(names, ", ")));
  }
  const auto has = [&](const char* name) {
    return std::find(excluded.begin(), excluded.end(), name) != excluded.end();
  };
  if (has("lr_scheduler") != has("train_state")) {
    fail_setting(config, key,
                 "the learning rate follows from the step: name both lr_scheduler and "
                 "train_state, or neither");
  }
  return {.optimizer = has("optimizer"), .data = has("dataloader"), .step = has("train_state")};
}

Excluded excluded_from_own(const JobConfig& config, const fs::path& step_folder) {
  Excluded excluded = excluded_from_loading(config);
  if (config.checkpoint.exclude_from_loading.empty()) return excluded;
  const Excluded before = excluded_when_saved(step_folder);
  std::vector<std::string> own;
  const auto keep_own = [&](bool& part, bool was_excluded, const char* names) {
    if (!part || !was_excluded) return;
    part = false;
    own.emplace_back(names);
  };
  keep_own(excluded.optimizer, before.optimizer, "optimizer");
  keep_own(excluded.data, before.data, "dataloader");
  keep_own(excluded.step, before.step, "lr_scheduler and train_state");
  if (!own.empty()) {
    log::info(
        "checkpoint.exclude_from_loading was followed before {} was saved: {} in it are the run's "
        "own, and restored",
        step_folder.string(), fmt::join(own, ", "));
  }
  return excluded;
}

fs::path find_initial_state(const JobConfig& config, const fs::path& path,
                            const dtensor::Communicator& ranks) {
  const bool verify = config.checkpoint.verify_on_load;
  return name_setting(config, "checkpoint.initial_load_path", [&] {
    const std::string kind = on_first(ranks, [&] {
      if (!fs::exists(path / checkpoint::kManifestName)) return "";
      return checkpoint::kind_name(checkpoint::CheckpointReader(path).manifest().model_only);
    });
    if (kind == checkpoint::kind_name(/*model_only=*/true)) {
      fail_user("'{}' holds the model only; set checkpoint.initial_load_model_only = true",
                path.string());
    }
    if (!kind.empty()) {
      if (verify) checkpoint::verify_together(path, &ranks);
      return path;
    }
    if (const auto found = checkpoint::find_resumable(path, -1, verify, &ranks)) return *found;
    fail_user("'{}' holds no full checkpoint", path.string());
  });
}

fs::path find_initial_weights(const JobConfig& config, const fs::path& path,
                              const dtensor::Communicator& ranks) {
  const bool verify = config.checkpoint.verify_on_load;
  return name_setting(config, "checkpoint.initial_load_path", [&] {
    const fs::path place = on_first(ranks, [&] { return checkpoint::locate(path).path.string(); });
    if (place == path) {
      if (verify) checkpoint::verify_together(path, &ranks);
      return path;
    }
    if (const auto found = checkpoint::find_weights(path, verify, &ranks)) return *found;
    fail_user("'{}' holds no checkpoint whose weights can be read", path.string());
  });
}

}  // namespace longhaul::train
