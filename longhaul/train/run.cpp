#include "longhaul/train/run.h"

#include <algorithm>
#include <chrono>
#include <filesystem>

#include "longhaul/base/error.h"
#include "longhaul/base/file.h"
#include "longhaul/base/log.h"
#include "longhaul/base/progress.h"
#include "longhaul/base/text.h"
#include "longhaul/checkpoint/checkpoint_reader.h"
#include "longhaul/config/capability.h"
#include "longhaul/config/write.h"
#include "longhaul/train/data_source.h"
#include "longhaul/train/guard.h"
#include "longhaul/train/preflight.h"
#include "longhaul/train/profiler.h"
#include "longhaul/train/run_folder.h"
#include "longhaul/train/startup_table.h"
#include "longhaul/train/summary.h"
#include "longhaul/train/trainer.h"
#include "longhaul/train/validation.h"

namespace longhaul::train {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

fs::path checkpoint_folder(const JobConfig& config) {
  return fs::path(config.job.dump_folder) / config.checkpoint.folder;
}

// The step at or beyond the job's last one that lies complete in the folder, whatever its kind.
std::optional<int64_t> finished_step(const JobConfig& config) {
  if (!config.checkpoint.enable || config.checkpoint.load_step >= 0) return std::nullopt;
  for (const auto& found : checkpoint::list_steps(checkpoint_folder(config))) {
    if (found.step < config.training.steps) continue;
    try {
      checkpoint::CheckpointReader(found.path).verify();
      return found.step;
    } catch (const UserError& error) {
      log::warn("{} is passed over: {}", found.path.string(), error.what());
    }
  }
  return std::nullopt;
}

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

// Going back to an earlier step begins another history: what came after it gets a name that nothing
// reads or purges, else the next start would pick the old history up again.
void abandon_later_steps(const fs::path& folder, int64_t step) {
  for (const auto& found : checkpoint::list_steps(folder)) {
    if (found.step <= step) continue;
    fs::path aside = found.path;
    for (int i = 1; fs::exists(aside); ++i) {
      aside = fmt::format("{}.abandoned-{}", found.path.string(), i);
    }
    fs::rename(found.path, aside);
    log::warn("{} is after checkpoint.load_step = {}; it is now {}", found.path.string(), step,
              aside.string());
  }
}

class Run {
 public:
  Run(const JobConfig& config, const ResolvedModel& resolved, const std::atomic<bool>& stop)
      : config_(config),
        stop_(stop),
        resolved_(resolved),
        trainer_(config, resolved_),
        start_(Clock::now()) {}

  Outcome execute();

 private:
  void prepare();
  StepMetrics take_step();
  StepMetrics take_profiled_step();
  void print_profile(const StepProfile& profile, const StepMetrics& metrics);
  void resume_or_begin();
  void open_validation();
  void open_metrics(const fs::path& folder);
  void after_step(StepMetrics& metrics);
  void report(const StepMetrics& metrics);
  double seconds_left() const;
  bool is_last() const { return trainer_.progress().step >= config_.training.steps; }
  bool wants_to_stop() const;
  bool due(int64_t every) const { return every > 0 && trainer_.progress().step % every == 0; }
  bool saves() const { return config_.checkpoint.enable && !config_.checkpoint.load_only; }
  void save(bool last);

  const JobConfig& config_;
  const std::atomic<bool>& stop_;
  ResolvedModel resolved_;
  Trainer trainer_;
  Clock::time_point start_;
  int64_t first_step_ = 0;
  std::unique_ptr<data::Dataset> validation_;
  std::unique_ptr<MetricsLog> metrics_;
  std::unique_ptr<ProgressLine> progress_line_;  // only on a terminal
  std::unique_ptr<Profiler> profiler_;           // only with profiling.enable_profiling
};

Outcome Run::execute() {
  prepare();
  while (!is_last()) {
    StepMetrics metrics = take_step();
    after_step(metrics);
    if (!is_last() && wants_to_stop()) {
      save(/*last=*/false);
      log::info("stopped after step {} of {}; {}", trainer_.progress().step, config_.training.steps,
                saves() ? "the same command goes on from here"
                        : "nothing is saved, since checkpoint.enable is false or load_only true");
      write_summary(config_.job.dump_folder);
      return Outcome::kStopped;
    }
    if (is_last()) {
      save(/*last=*/true);
    } else if (due(config_.checkpoint.interval) ||
               (trainer_.progress().step == 1 && config_.checkpoint.enable_first_step_checkpoint)) {
      save(/*last=*/false);
    }
  }
  write_summary(config_.job.dump_folder);
  log::info("finished {} steps in {}; summary in {}", trainer_.progress().step,
            human_seconds(seconds_since(start_)),
            (fs::path(config_.job.dump_folder) / "summary.md").string());
  return Outcome::kFinished;
}

// A step that the guard refuses has changed nothing: the state before it is kept, if it is sound.
StepMetrics Run::take_step() {
  try {
    return profiler_ ? take_profiled_step() : trainer_.step();
  } catch (const UserError&) {
    const int64_t step = trainer_.progress().step;
    const fs::path there = checkpoint::step_path(checkpoint_folder(config_), step);
    const bool sound = find_nonfinite(trainer_.model()).empty();
    if (step > first_step_ && sound && !fs::exists(there)) save(/*last=*/false);
    throw;
  }
}

StepMetrics Run::take_profiled_step() {
  const int64_t step = trainer_.progress().step + 1;
  profiler_->begin_step(step, trainer_.model().settings().device);
  const StepMetrics metrics = trainer_.step();
  if (const auto profile = profiler_->end_step(step)) print_profile(*profile, metrics);
  return metrics;
}

void Run::print_profile(const StepProfile& profile, const StepMetrics& metrics) {
  const auto sizes = batch_sizes(config_);
  const auto batch = load_batch(trainer_.dataset(), 0, sizes.local);
  const double host =
      measure_host_seconds(config_, resolved_, batch) * static_cast<double>(sizes.micro_batches());
  log::info("{} step{} up to {}, {:.1f}% of the peak; trace in {}\n{}", profile.steps,
            profile.steps == 1 ? "" : "s", metrics.step, 100 * metrics.mfu,
            profiler_->trace_path(metrics.step).string(), to_table(profile, host));
}

void Run::prepare() {
  open_validation();
  resume_or_begin();
  first_step_ = trainer_.progress().step;
  const fs::path folder = config_.job.dump_folder;
  open_metrics(folder);
  write_atomic(folder / "job.toml", to_toml(config_));
  if (config_.job.save_config_file) {
    write_atomic(folder / *config_.job.save_config_file, to_toml(config_));
  }
  log::info("{}\n{}", config_.job.description, startup_table(config_, resolved_, trainer_));
  if (config_.profiling.enable_profiling) profiler_ = std::make_unique<Profiler>(config_);
  if (config_.model.print_after_conversion) log::info("the model\n{}", trainer_.model().describe());
  if (const auto output = ProgressLine::standard_error(); output.terminal) {
    progress_line_ = std::make_unique<ProgressLine>("training", config_.training.steps,
                                                    ProgressLine::Unit::kCount, output);
  }
  start_ = Clock::now();
}

// A run that only looks at checkpoints cannot be gone on from, so the history of the run that made
// them stays as it is, and its own goes to a file beside.
void Run::open_metrics(const fs::path& folder) {
  const bool only_looks = config_.checkpoint.enable && !saves();
  const bool beside = only_looks && !checkpoint::list_steps(checkpoint_folder(config_)).empty();
  const char* name = beside ? "metrics.load_only.jsonl" : "metrics.jsonl";
  metrics_ = std::make_unique<MetricsLog>(folder / name, only_looks ? 0 : first_step_);
}

void Run::open_validation() {
  if (!config_.validation.enable) return;
  validation_ = open_data(validation_data(config_, resolved_.shape.vocab_size,
                                          resolved_.shape.num_nextn_predict_layers),
                          config_);
}

void Run::resume_or_begin() {
  const auto& options = config_.checkpoint;
  if (!options.enable) return;
  const fs::path folder = checkpoint_folder(config_);
  // As in TorchTitan, load_step matters only once there is something to choose from.
  const bool any = !checkpoint::list_steps(folder).empty();
  if (!any && options.load_step > 0) {
    log::warn("checkpoint.load_step = {}: there are no checkpoints in {}, so the run begins anew",
              options.load_step, folder.string());
  }
  const auto find = [&] { return checkpoint::find_resumable(folder, options.load_step); };
  if (const auto found = any ? name_setting(config_, "checkpoint.load_step", find) : std::nullopt) {
    if (options.load_step >= 0 && saves()) abandon_later_steps(folder, options.load_step);
    trainer_.restore(checkpoint::load(*found, /*verify=*/false));
    log::info("resumed from {}", found->string());
    return;
  }
  refuse_to_start_over(folder);
  // As in TorchTitan: a Hugging Face start without a path takes the model's own folder.
  auto path = options.initial_load_path;
  if (!path && options.initial_load_in_hf) path = config_.model.hf_assets_path;
  if (!path) return;
  trainer_.load_weights(*path, options.initial_load_in_hf);
  log::info("initial weights from {}", *path);
}

void Run::after_step(StepMetrics& metrics) {
  if (validation_ && (metrics.step == 1 || due(config_.validation.freq) || is_last())) {
    metrics.validation = validate(trainer_.model(), *validation_,
                                  {.batch_size = config_.validation.local_batch_size,
                                   .max_batches = config_.validation.steps});
  }
  metrics_->append(metrics);
  report(metrics);
}

// Until the last step, or until training.max_minutes ends the run.
double Run::seconds_left() const {
  const int64_t step = trainer_.progress().step;
  const double elapsed = seconds_since(start_);
  const double per_step = elapsed / static_cast<double>(step - first_step_);
  const double left = per_step * static_cast<double>(config_.training.steps - step);
  const double limit = 60 * config_.training.max_minutes;
  return limit > 0 ? std::clamp(limit - elapsed, 0.0, left) : left;
}

void Run::report(const StepMetrics& metrics) {
  if (progress_line_) progress_line_->update(metrics.step, short_line(metrics, seconds_left()));
  const bool first = metrics.step == first_step_ + 1;
  const bool remarkable = first || is_last() || metrics.validation || metrics.skipped;
  if (!remarkable && !due(config_.metrics.log_freq)) return;
  const auto line = to_line(metrics, config_.training.steps, seconds_left());
  metrics.skipped ? log::warn("{}", line) : log::info("{}", line);
}

bool Run::wants_to_stop() const {
  const double minutes = config_.training.max_minutes;
  return stop_.load() || (minutes > 0 && seconds_since(start_) > 60 * minutes);
}

void Run::save(bool last) {
  const auto& options = config_.checkpoint;
  if (!saves()) return;
  // Such a checkpoint is worth nothing, and sound ones would be purged for it.
  if (const std::string name = find_nonfinite(trainer_.model()); !name.empty()) {
    fail_user(
        "step {} is not saved: {} holds values that are not finite; go on from an older checkpoint "
        "with a lower optimizer.lr",
        trainer_.progress().step, name);
  }
  const fs::path folder = checkpoint_folder(config_);
  const auto start = Clock::now();
  const fs::path saved =
      checkpoint::save(folder, trainer_.snapshot(last && options.last_save_model_only));
  checkpoint::purge(folder, narrow<int>(options.keep_latest_k));
  log::info("saved {} in {}", saved.string(), human_seconds(seconds_since(start)));
}

}  // namespace

Outcome run_training(const JobConfig& config, const std::atomic<bool>& stop) {
  refuse_missing_behaviour(config);
  set_determinism(config);
  const ResolvedModel resolved = resolve_model(config);
  check_converters(config);
  check_machine(config, resolved);
  const FileDescriptor claim = claim_run_folder(config);
  if (const auto step = finished_step(config)) {
    log::info("nothing to do: training.steps is {} and step {} is already in {}",
              config.training.steps, *step, checkpoint_folder(config).string());
    return Outcome::kAlreadyDone;
  }
  return Run(config, resolved, stop).execute();
}

}  // namespace longhaul::train
