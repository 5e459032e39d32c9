#include "longhaul/checkpoint/saver.h"

#include <fmt/ranges.h>

#include <atomic>
#include <chrono>

#include "longhaul/base/clock.h"
#include "longhaul/base/log.h"
#include "longhaul/base/text.h"
#include "longhaul/checkpoint/checkpoint_reader.h"

namespace longhaul::checkpoint {

using Clock = std::chrono::steady_clock;

// One save after another.
struct Saver::Job {
  SaverOptions options;
  std::shared_ptr<const void> ranks_need;
  dtensor::Communicator ranks;       // after what it needs
  Snapshot saved = {};               // what is being saved, or was
  std::set<int64_t> others = {};     // steps of another history
  int64_t number = 0;                // of the save, from 1
  int64_t step = 0;                  // that it saves
  bool ended = false;                // nothing can be saved any more
  std::atomic<int64_t> progress{0};  // counts what is done: pieces, files, stages of a save

  SaveOptions save_options() {
    const auto count = [this] { ++progress; };
    return {.ranks = &ranks, .pin_memory = options.mode == AsyncMode::kPinned, .progress = count};
  }
  [[noreturn]] void fail_lost(const std::string& error);
  std::string name() const {
    return fmt::format("rank {}: save {} (step {})", ranks.global_rank(), number, step);
  }
  std::string given_up_text() const {
    return fmt::format(
        "{}: nothing was written to '{}' for {}, and it was given up: the disk hangs or is too "
        "slow; look at it, or raise comm.init_timeout_seconds",
        name(), options.folder.string(),
        human_seconds(2 * std::chrono::duration<double>(options.timeout).count()));
  }
};

// Ranks that have lost one another stand at different collectives: what they would tell each other
// next means something else to each.
void Saver::Job::fail_lost(const std::string& error) {
  ended = true;
  throw dtensor::CollectiveError(fmt::format(
      "{}: the ranks have lost one another: {}; older checkpoints are as they were, and "
      "the same command goes on from the newest in '{}'",
      name(), error, options.folder.string()));
}

// What a disk or a memory has damaged on its way is not what the sound ones are deleted for.
void verify_new(const fs::path& folder, const PurgeOptions& options) {
  const CheckpointReader reader(step_path(folder, options.saved_step));
  if (!reader.manifest().model_only) reader.verify({}, options.progress);
}

// What is saved is safe, whatever becomes of the older ones.
void purge_or_warn(const fs::path& folder, const PurgeOptions& options) {
  try {
    if (options.keep_latest_k == 1) verify_new(folder, options);  // it is to stay alone
    purge(folder, options);
  } catch (const std::exception& error) {
    log::warn("old checkpoints in '{}' are not deleted: {}", folder.string(), error.what());
  }
}

Saver::Saver(SaverOptions options, dtensor::Communicator ranks,
             std::shared_ptr<const void> ranks_need)
    : job_(new Job{std::move(options), std::move(ranks_need), std::move(ranks)}) {
  job_->ranks.set_timeout(job_->options.timeout);
}

Saver::~Saver() {
  try {
    collect();
  } catch (const Error& error) {
    failure_ = error.what();
  }
  if (failure_) log::error("a checkpoint could not be saved: {}", *failure_);
  end_purging();
}

void Saver::goes_on_from(int64_t step) {
  job_->others = find_later_steps(job_->options.folder, step);
  if (job_->others.empty() || job_->options.keep_latest_k == 0 || job_->ranks.rank() != 0) return;
  log::warn(
      "'{}' holds checkpoints after step {}, where this run goes on: {}; they are another history, "
      "neither counted by checkpoint.keep_latest_k nor deleted",
      job_->options.folder.string(), step, fmt::join(job_->others, ", "));
}

// After the save under way.
void Saver::begin(int64_t step) {
  LONGHAUL_CHECK(!job_->ended, "step {}: a save was given up before", step);
  collect();
  if (failure_) log::error("a checkpoint could not be saved: {}", *failure_);
  failure_.reset();
  job_->number += 1;
  job_->step = step;
}

void Saver::save(const Snapshot& snapshot, bool keep_older) {
  const auto start = Clock::now();
  begin(snapshot.step);
  keep_older_ = keep_older;
  const SaveOptions options = job_->save_options();
  const bool at_once = job_->options.mode == AsyncMode::kDisabled;
  job_->saved = at_once ? snapshot : stage(snapshot, options, std::move(job_->saved));
  saving_.start([job = job_, options, start] {
    const fs::path saved = checkpoint::save(job->options.folder, job->saved, options);
    if (job->ranks.rank() != 0) return;
    log::info("saved {} in {}", saved.string(), human_seconds(seconds_since(start)));
  });
  if (!at_once) return;
  end_save();
  job_->saved = {};
}

void Saver::write_beside(int64_t step, std::function<void(const SaveOptions& options)> write) {
  begin(step);
  saving_.start([job = job_, write = std::move(write)] { write(job->save_options()); });
  end_writing();
}

void Saver::Task::start(std::function<void()> action) {
  std::packaged_task<void()> task(std::move(action));
  end = task.get_future();
  thread = std::thread(std::move(task));
}

// False if there is no progress any more; by then the ranks' own limit has ended a wait for another
// rank. The thread is left to itself.
bool Saver::wait_for(Task& task) {
  const auto limit = 2 * job_->options.timeout;
  int64_t before = job_->progress;
  auto moved = Clock::now();
  while (task.end.wait_for(limit / 16) != std::future_status::ready) {
    if (const int64_t now = job_->progress; now != before) {
      before = now;
      moved = Clock::now();
    } else if (Clock::now() - moved >= limit) {
      task.thread.detach();
      task.end = {};
      return false;
    }
  }
  task.thread.join();
  return true;
}

// Waits for what is being written and throws what it failed with.
void Saver::end_writing() {
  if (!wait_for(saving_)) {
    job_->ended = true;
    throw UserError(job_->given_up_text());
  }
  try {
    saving_.end.get();
  } catch (const dtensor::CollectiveError& error) {
    job_->fail_lost(error.what());
  }
}

void Saver::end_save() {
  end_writing();
  job_->others.erase(job_->step);
  if (!keep_older_) start_purging(job_->step);
}

// Beside the steps that follow: the other ranks do not wait for it. Where one is under way, the
// next one, or that of finish(), deletes what this would.
void Saver::start_purging(int64_t saved_step) {
  if (job_->ranks.rank() != 0) return;
  skipped_purge_.reset();
  if (purging_.under_way()) {
    skipped_purge_ = saved_step;
    return;
  }
  end_purging();
  purging_.start(
      [job = job_, options = PurgeOptions{.keep_latest_k = job_->options.keep_latest_k,
                                          .saved_step = saved_step,
                                          .others = job_->others,
                                          .progress = [job = job_] { ++job->progress; }}] {
        purge_or_warn(job->options.folder, options);
      });
}

// False if it is given up.
bool Saver::end_purging() {
  if (!purging_.end.valid()) return true;
  if (!wait_for(purging_)) {
    log::warn("deleting old checkpoints in '{}' makes no progress, and is given up",
              job_->options.folder.string());
    return false;
  }
  purging_.end.get();
  return true;
}

bool Saver::Task::under_way() const {
  return end.valid() && end.wait_for(std::chrono::seconds(0)) != std::future_status::ready;
}

// The same, but keeps what it failed with if all ranks know of it.
void Saver::collect() {
  if (!saving_.end.valid()) return;
  try {
    end_save();
  } catch (const std::exception& error) {
    if (job_->ended) throw;
    failure_ = error.what();
  }
}

std::optional<std::string> Saver::failure() {
  if (!saving_.under_way()) collect();
  return std::exchange(failure_, std::nullopt);
}

void Saver::finish() {
  collect();
  if (end_purging() && skipped_purge_) {
    start_purging(*skipped_purge_);
    end_purging();
  }
  if (failure_) throw UserError(*std::exchange(failure_, std::nullopt));
}

}  // namespace longhaul::checkpoint
