#include "longhaul/train/run.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <numeric>

#include "longhaul/base/clock.h"
#include "longhaul/base/error.h"
#include "longhaul/base/fault.h"
#include "longhaul/base/file.h"
#include "longhaul/base/log.h"
#include "longhaul/base/progress.h"
#include "longhaul/base/quiet.h"
#include "longhaul/base/text.h"
#include "longhaul/checkpoint/checkpoint_reader.h"
#include "longhaul/checkpoint/saver.h"
#include "longhaul/config/capability.h"
#include "longhaul/config/write.h"
#include "longhaul/dtensor/exchange.h"
#include "longhaul/train/data_source.h"
#include "longhaul/train/device.h"
#include "longhaul/train/guard.h"
#include "longhaul/train/hf_export.h"
#include "longhaul/train/preflight.h"
#include "longhaul/train/profiler.h"
#include "longhaul/train/results/environment.h"
#include "longhaul/train/results/starts.h"
#include "longhaul/train/results/step_writer.h"
#include "longhaul/train/resume.h"
#include "longhaul/train/run_folder.h"
#include "longhaul/train/startup_table.h"
#include "longhaul/train/summary.h"
#include "longhaul/train/trainer.h"
#include "longhaul/train/validation.h"

namespace longhaul::train {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

// Whether the folder holds a complete full checkpoint of that step, whatever its checksums say.
bool is_full(const fs::path& step_folder, int64_t step) {
  try {
    const checkpoint::CheckpointReader reader(step_folder);
    return reader.manifest().step == step && !reader.manifest().model_only;
  } catch (const UserError&) {
    return false;
  }
}

checkpoint::SaverOptions saver_options(const JobConfig& config) {
  using checkpoint::AsyncMode;
  const std::string& mode = config.checkpoint.async_mode;
  return {.folder = checkpoint_folder(config),
          .keep_latest_k = narrow<int>(config.checkpoint.keep_latest_k),
          .mode = mode == "async"                   ? AsyncMode::kCopy
                  : mode == "async_with_pinned_mem" ? AsyncMode::kPinned
                                                    : AsyncMode::kDisabled,
          .timeout = std::chrono::seconds(config.comm.init_timeout_seconds)};
}

// A save in the background talks over it during steps, with the limit of a save.
dtensor::Communicator ranks_for_saving(dtensor::World& world, const JobConfig& config) {
  std::vector<int> ranks(world.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  return world.make_group("checkpoint", ranks, std::nullopt,
                          std::chrono::seconds(config.comm.init_timeout_seconds));
}

bool only_looks(const JobConfig& config) { return config.checkpoint.enable && !saves(config); }

class Run {
 public:
  Run(const JobConfig& config, const ResolvedModel& resolved, const parallel::ParallelDims& dims,
      dtensor::World& world, const std::atomic<bool>& stop)
      : config_(config),
        world_(world),
        stop_(stop),
        resolved_(resolved),
        trainer_(config, resolved_, dims),
        start_(Clock::now()) {
    if (!saves(config)) return;
    saver_.emplace(saver_options(config), ranks_for_saving(world, config), world.shared_log());
  }

  Outcome execute();

 private:
  void prepare();
  void open_run_folder();
  void describe_run();
  int64_t last_step_of_history() const;
  StepMetrics take_step();
  StepMetrics take_profiled_step();
  void print_profile(const StepProfile& profile, const StepMetrics& metrics);
  void resume_or_begin();
  void open_validation();
  void open_metrics();
  void after_step(StepMetrics& metrics);
  void report(const StepMetrics& metrics);
  double seconds_left() const;
  bool is_first_rank() const { return trainer_.dims().is_first(); }
  bool is_last() const { return data_ended_ || trainer_.progress().step >= config_.training.steps; }
  bool wants_to_stop() const;
  void look_for_end_of_data();
  bool is_saved() const;
  bool due(int64_t every) const { return every > 0 && trainer_.progress().step % every == 0; }
  void save(bool last);
  void make_way_for(bool model_only);
  void rescue_state();
  void save_in_hf();
  void finish_saving();
  void end(StepMetrics* last);
  void report_failed_save();

  const JobConfig& config_;
  dtensor::World& world_;
  const std::atomic<bool>& stop_;
  ResolvedModel resolved_;
  Trainer trainer_;
  Clock::time_point start_;
  int64_t first_step_ = 0;
  // It only looks at another run's checkpoints in this folder: the history of that one stays as it
  // is, and what this one measures goes to a file beside.
  bool beside_ = false;
  bool data_ended_ = false;
  bool refused_ = false;       // the last step, by the guard
  double saving_seconds_ = 0;  // that training stood still for since the last step
  std::unique_ptr<data::Dataset> validation_;
  std::unique_ptr<StepWriter> writer_;           // of the first rank, or of each
  std::unique_ptr<ProgressLine> progress_line_;  // only on a terminal
  std::unique_ptr<Profiler> profiler_;           // only if the job records steps
  std::optional<checkpoint::Saver> saver_;       // last: it saves to the end
};

Outcome Run::execute() {
  prepare();
  // It goes on from where its data ends: no step is left, but what the last one leaves behind is.
  if (is_last()) save(/*last=*/true);
  StepMetrics metrics;
  while (!is_last()) {
    metrics = take_step();
    look_for_end_of_data();
    report_failed_save();
    // The first step takes longer.
    world_.set_timeout(std::chrono::seconds(config_.comm.train_timeout_seconds));
    after_step(metrics);
    if (!is_last() && wants_to_stop()) {
      save(/*last=*/false);
      end(&metrics);
      log::info("stopped after step {} of {}; {}", trainer_.progress().step, config_.training.steps,
                saves(config_)
                    ? "the same command goes on from here"
                    : "nothing is saved, since checkpoint.enable is false or load_only true");
      return Outcome::kStopped;
    }
    if (is_last()) {
      save(/*last=*/true);
    } else if (due(config_.checkpoint.interval) ||
               (trainer_.progress().step == 1 && config_.checkpoint.enable_first_step_checkpoint)) {
      save(/*last=*/false);
    }
  }
  end(trainer_.progress().step > first_step_ ? &metrics : nullptr);
  log::info("finished {} steps in {}; summary in {}", trainer_.progress().step,
            human_seconds(seconds_since(start_)),
            (fs::path(config_.job.dump_folder) / "summary.md").string());
  return Outcome::kFinished;
}

// A step that the guard refuses has changed nothing: the state before it is kept, if it is sound.
StepMetrics Run::take_step() {
  fault::at("train.step");
  const auto start = Clock::now();
  const auto before = world_.log().totals();
  try {
    StepMetrics metrics = profiler_ ? take_profiled_step() : trainer_.step();
    refused_ = metrics.skipped;
    add_communication(dtensor::since(before, world_.log().totals()), seconds_since(start), metrics);
    return metrics;
  } catch (const StepRefused&) {
    refused_ = true;
    const bool sound = find_nonfinite(trainer_.model(), *trainer_.dims().all).empty();
    if (trainer_.progress().step > first_step_ && sound && !is_saved()) {
      save(/*last=*/false);
      finish_saving();
      if (is_first_rank() && saves(config_)) {
        log::warn(
            "step {} is saved and older checkpoints stay: its weights are finite, but they may be "
            "what the next step fails from. If it fails again, go back with checkpoint.load_step",
            trainer_.progress().step);
      }
    }
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
  Strings names;
  for (const auto& file : profile.files) names.push_back(file.string());
  const auto sizes = batch_sizes(config_, trainer_.dims().data_size());
  const double host = measure_host_seconds(config_, resolved_, sizes.local) *
                      static_cast<double>(sizes.micro_batches());
  log::info("{} step{} up to {}, {:.1f}% of the peak; recorded in {}\n{}", profile.steps,
            profile.steps == 1 ? "" : "s", metrics.step, 100 * metrics.mfu,
            fmt::join(names, " and "), to_table(profile, host));
}

void Run::prepare() {
  open_validation();
  resume_or_begin();
  first_step_ = trainer_.progress().step;
  beside_ = only_looks(config_) && !checkpoint::list_steps(checkpoint_folder(config_)).empty();
  if (saver_) saver_->goes_on_from(first_step_);
  look_for_end_of_data();
  if (is_first_rank()) open_run_folder();
  if (is_first_rank() || config_.metrics.save_for_all_ranks) open_metrics();
  // What the preparation took does not count as activations.
  restart_most_tensor_bytes(trainer_.model().settings().device);
  start_ = Clock::now();
}

void Run::describe_run() {
  const fs::path folder = config_.job.dump_folder;
  write_atomic(folder / "job.toml", to_toml(config_));
  if (config_.job.save_config_file) {
    write_atomic(folder / *config_.job.save_config_file, to_toml(config_));
  }
  add_start(folder / "environment.json", last_step_of_history(),
            environment(trainer_.model().settings().device, trainer_.dims().degrees));
}

void Run::open_run_folder() {
  if (!beside_) describe_run();
  log::info("{}\n{}", config_.job.description, startup_table(config_, resolved_, trainer_));
  if (records_steps(config_)) profiler_ = std::make_unique<Profiler>(config_);
  if (config_.model.print_after_conversion) log::info("the model\n{}", trainer_.model().describe());
  if (const auto output = ProgressLine::standard_error(); output.terminal) {
    progress_line_ = std::make_unique<ProgressLine>("training", config_.training.steps,
                                                    ProgressLine::Unit::kCount, output);
  }
}

void Run::open_metrics() {
  const int rank = trainer_.dims().all->rank();
  const std::string name = fmt::format("metrics{}{}.jsonl", beside_ ? ".load_only" : "",
                                       rank == 0 ? "" : fmt::format(".rank-{}", rank));
  writer_ =
      std::make_unique<StepWriter>(config_, StepWriterOptions{.metrics_file = name,
                                                              .last_step = last_step_of_history(),
                                                              .rank = rank,
                                                              .metrics_only = beside_});
}

// A run that only looks at checkpoints cannot be gone on from.
int64_t Run::last_step_of_history() const { return only_looks(config_) ? 0 : first_step_; }

void Run::open_validation() {
  if (!config_.validation.enable) return;
  DataRequest request = validation_data(config_, resolved_.shape.vocab_size,
                                        resolved_.shape.num_nextn_predict_layers);
  if (is_first_rank()) request.bad_documents = fs::path(config_.job.dump_folder) / kBadDocuments;
  validation_ = open_data(request, config_);
  check_same_tokenizer(trainer_.dataset(), *validation_, "validation.dataset_path", config_);
}

void Run::resume_or_begin() {
  const auto& options = config_.checkpoint;
  if (!options.enable) return;
  const Excluded excluded = excluded_from_loading(config_);
  const auto& ranks = *trainer_.dims().all;
  if (const auto found = find_resumable_step(config_, ranks)) {
    const Excluded of_own = excluded_from_own(config_, *found);
    if (of_own.step) {
      fail_setting(
          config_, "checkpoint.exclude_from_loading",
          "a run that goes on has the step of its own checkpoint; leave train_state out, or "
          "start a new run with checkpoint.initial_load_path");
    }
    trainer_.restore(*found, of_own);
    abandon_later_steps(config_, ranks);
    log::info("resumed from {}", found->string());
    return;
  }
  // As in TorchTitan: a Hugging Face start without a path takes the model's own folder.
  auto path = options.initial_load_path;
  if (!path && options.initial_load_in_hf) path = config_.model.hf_assets_path;
  if (!path) return;
  if (!options.initial_load_model_only) {
    const fs::path state = find_initial_state(config_, *path, ranks);
    trainer_.restore(state, excluded);
    log::info("goes on from {}", state.string());
    return;
  }
  const fs::path weights =
      options.initial_load_in_hf ? fs::path(*path) : find_initial_weights(config_, *path, ranks);
  trainer_.load_weights(weights, options.initial_load_in_hf);
  log::info("initial weights from {}", weights.string());
}

void Run::after_step(StepMetrics& metrics) {
  if (saving_seconds_ > 0) metrics.seconds["checkpoint"] = std::exchange(saving_seconds_, 0);
  if (validation_ && (metrics.step == 1 || due(config_.validation.freq) || is_last())) {
    const auto start = Clock::now();
    metrics.validation =
        trainer_.validate(*validation_, {.batch_size = config_.validation.local_batch_size,
                                         .max_batches = config_.validation.steps});
    metrics.seconds["validation"] = seconds_since(start);
  }
  if (writer_) writer_->append(metrics);
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

// If one rank does, all do. Collective.
bool Run::wants_to_stop() const {
  const double minutes = config_.training.max_minutes;
  const bool wants = stop_.load() || (minutes > 0 && seconds_since(start_) > 60 * minutes);
  return dtensor::reduce_number(*trainer_.dims().all, wants, dtensor::Reduction::kMax) == 1;
}

// If one rank has no rows for the next step, no rank takes it. Collective.
void Run::look_for_end_of_data() {
  const auto& [step, rows, tokens] = trainer_.progress();
  const auto rank = step < config_.training.steps ? trainer_.rank_out_of_data() : std::nullopt;
  if (!rank) return;
  const auto batch =
      static_cast<uint64_t>(batch_sizes(config_, trainer_.dims().data_size()).global);
  const data::Dataset& data = trainer_.dataset();
  // A stream knows its end only when it was asked for what is behind it.
  data.has_row(rows + batch - 1);
  const uint64_t there = data.num_rows().value_or(0);
  if (step == 0) {
    fail_setting(config_, "training.repeat",
                 fmt::format("rank {} has not the rows of a single step; the data has {} and a "
                             "step takes {}: set it to true, or give more data",
                             *rank, there, batch));
  }
  data_ended_ = true;
  log::info(
      "the data ends: rank {} has not the rows of step {}, so step {} of {} is the last one for "
      "all; {} of {} rows are left out",
      *rank, step + 1, step, config_.training.steps, there - std::min(there, rows), there);
}

// Whether this step's state lies in the folder. Collective.
bool Run::is_saved() const {
  const fs::path there =
      checkpoint::step_path(checkpoint_folder(config_), trainer_.progress().step);
  const auto& dims = trainer_.dims();
  return dtensor::together(dims.all.get(), [&] {
           return dims.is_first() && is_full(there, trainer_.progress().step) ? "yes" : "";
         })[0] == "yes";
}

void Run::save(bool last) {
  const auto& options = config_.checkpoint;
  if (!saves(config_)) return;
  // Such a checkpoint is worth nothing, and sound ones would be purged for it.
  if (const std::string name = find_nonfinite(trainer_.model(), *trainer_.dims().all);
      !name.empty()) {
    fail_user(
        "step {} is not saved: {} holds values that are not finite; go on from an older checkpoint "
        "with a lower optimizer.lr",
        trainer_.progress().step, name);
  }
  const auto start = Clock::now();
  // Ranks that write are waited for longer than ranks that compute.
  world_.set_timeout(std::chrono::seconds(config_.comm.init_timeout_seconds));
  const bool weights_only = last && options.last_save_model_only;
  try {
    // Before the checkpoint, with which the run is finished.
    if (weights_only && options.last_save_in_hf) save_in_hf();
    if (trainer_.progress().step == first_step_ && is_saved()) {
      log::info("step {} stays as it is saved: the run goes on from it", first_step_);
    } else if (weights_only) {
      make_way_for(/*model_only=*/true);
      saver_->save(trainer_.weights(export_dtype(config_)));
      saver_->finish();  // in the background, too: no later save would rescue the state
    } else {
      make_way_for(/*model_only=*/false);
      // What the guard has refused may come of these weights: sound ones are not deleted for them.
      saver_->save(trainer_.snapshot(), /*keep_older=*/refused_);
    }
  } catch (const dtensor::CollectiveError&) {
    throw;
  } catch (const std::exception&) {
    // On all ranks, of which only one may know more than that it failed.
    if (weights_only) rescue_state();
    throw;
  }
  world_.set_timeout(std::chrono::seconds(config_.comm.train_timeout_seconds));
  saving_seconds_ += seconds_since(start);
}

// Collective.
void Run::make_way_for(bool model_only) {
  make_way(config_, trainer_.progress().step, model_only, *trainer_.dims().all);
}

// Where the weights could not be saved alone (values too large for their dtype, a folder that
// cannot be written), the steps since the last checkpoint are not lost for it.
void Run::rescue_state() {
  try {
    if (trainer_.progress().step == first_step_ && is_saved()) return;  // it goes on from it
    make_way_for(/*model_only=*/false);
    saver_->save(trainer_.snapshot());
    saver_->finish();
    if (is_first_rank()) {
      log::info("the weights are not saved alone, but the whole state of step {} is",
                trainer_.progress().step);
    }
  } catch (const std::exception& error) {
    log::error("step {} is lost: {}", trainer_.progress().step, error.what());
  }
}

void Run::save_in_hf() {
  const int64_t step = trainer_.progress().step;
  const fs::path folder = hf_folder(config_, step);
  saver_->write_beside(step,
                       [folder, weights = trainer_.weights(export_dtype(config_)),
                        model = trainer_.model().config(), assets = config_.model.hf_assets_path,
                        fp8 = exports_fp8(config_)](const checkpoint::SaveOptions& save) {
                         export_hf(folder, weights, model,
                                   {.assets = assets,
                                    .fp8 = fp8,
                                    .replace = true,
                                    .ranks = save.ranks,
                                    .progress = [&](int64_t, int64_t) { save.progress(); }});
                       });
  log::info("Hugging Face folder in {}", folder.string());
}

void Run::finish_saving() {
  const auto start = Clock::now();
  if (saver_) saver_->finish();
  saving_seconds_ += seconds_since(start);
}

// No later line can tell how long the last save took; `last` is the run's last step, if it took
// one.
void Run::end(StepMetrics* last) {
  finish_saving();
  if (writer_ && last != nullptr && saver_) {
    last->seconds["checkpoint"] += std::exchange(saving_seconds_, 0);
    writer_->add_last_save(*last);
  }
  if (const int64_t bad = trainer_.dataset().bad_documents(); bad > 0) {
    log::warn(
        "{} bad documents of the training data were left out, counted in each pass anew and with "
        "those that were only read ahead; {} lists them",
        with_commas(bad), (fs::path(config_.job.dump_folder) / kBadDocuments).string());
  }
  if (is_first_rank() && !beside_) write_summary(config_.job.dump_folder);
}

// A save in the background failed: the run is not lost for it, and the next one may succeed.
void Run::report_failed_save() {
  const auto failure = saver_ ? saver_->failure() : std::nullopt;
  if (failure) {
    log::error("a checkpoint could not be saved, and training goes on without it: {}", *failure);
  }
}

}  // namespace

Outcome run_training(const JobConfig& config, const std::atomic<bool>& stop,
                     dtensor::World& world) {
  const Quiet quiet(world.rank() > 0);
  refuse_missing_behaviour(config, world.size());
  world.set_timeout(std::chrono::seconds(config.comm.init_timeout_seconds));
  const auto dims = parallel::ParallelDims::make(config, world);
  set_determinism(config);
  const ResolvedModel resolved = resolve_model(config);
  check_converters(config, resolved.shape);
  check_parallelism(config, resolved, dims.degrees);
  check_machine(config, resolved, dims.fsdp->size() * dims.degrees.tp);
  const FileDescriptor claim = dims.is_first() ? claim_run_folder(config) : FileDescriptor();
  const FileDescriptor claim_of_saves =
      dims.is_first() && saves(config) ? claim_checkpoint_folder(config) : FileDescriptor();
  const auto finished = finished_step(config, *dims.all);
  if (finished && !lacks_export(config, *finished, *dims.all)) {
    log::info("nothing to do: training.steps is {} and step {} is already in {}",
              config.training.steps, *finished, checkpoint_folder(config).string());
    if (const fs::path wanted = hf_folder(config, *finished);
        config.checkpoint.last_save_in_hf && !fs::exists(wanted)) {
      log::info("for the Hugging Face folder: longhaul convert {} {}",
                checkpoint::step_path(checkpoint_folder(config), *finished).string(),
                wanted.string());
    }
    return Outcome::kAlreadyDone;
  }
  return Run(config, resolved, dims, world, stop).execute();
}

}  // namespace longhaul::train
