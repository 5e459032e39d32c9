#include "longhaul/checkpoint/saver.h"

#include <fmt/ranges.h>

#include <atomic>
#include <chrono>

#include "longhaul/base/clock.h"
#include "longhaul/base/log.h"
#include "longhaul/base/text.h"

namespace longhaul::checkpoint {

using Clock = std::chrono::steady_clock;

// One save after another.
struct Saver::Job {
  SaverOptions options;
  std::shared_ptr<const void> ranks_need;
  dtensor::Communicator ranks;  // after what it needs
  StagedSnapshot staged = {};
  std::set<int64_t> others = {};     // steps of another history
  int64_t number = 0;                // of the save, from 1
  int64_t step = 0;                  // that it saves
  bool ended = false;                // nothing can be saved any more
  std::atomic<int64_t> progress{0};  // counts what is done: pieces, files, stages of a save

  SaveOptions save_options() {
    const auto count = [this] { ++progress; };
    return {.ranks = &ranks, .pin_memory = options.mode == AsyncMode::kPinned, .progress = count};
  }
  void done(const fs::path& saved, Clock::time_point start);
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

// What is saved is safe, whatever becomes of the older ones.
void Saver::Job::done(const fs::path& saved, Clock::time_point start) {
  others.erase(step);
  if (ranks.rank() != 0) return;
  log::info("saved {} in {}", saved.string(), human_seconds(seconds_since(start)));
  try {
    checkpoint::purge(options.folder, {.keep_latest_k = options.keep_latest_k,
                                       .saved_step = step,
                                       .others = others,
                                       .progress = [this] { ++progress; }});
  } catch (const std::exception& error) {
    log::warn("old checkpoints in '{}' are not deleted: {}", options.folder.string(), error.what());
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
}

void Saver::goes_on_from(int64_t step) {
  job_->others = find_later_steps(job_->options.folder, step);
  if (job_->others.empty() || job_->options.keep_latest_k == 0 || job_->ranks.rank() != 0) return;
  log::warn(
      "'{}' holds checkpoints after step {}, where this run goes on: {}; they are another history, "
      "neither counted by checkpoint.keep_latest_k nor deleted",
      job_->options.folder.string(), step, fmt::join(job_->others, ", "));
}

void Saver::save(const Snapshot& snapshot) {
  const auto start = Clock::now();
  LONGHAUL_CHECK(!job_->ended, "step {}: a save was given up before", snapshot.step);
  collect();
  if (failure_) log::error("a checkpoint could not be saved: {}", *failure_);
  failure_.reset();
  job_->number += 1;
  job_->step = snapshot.step;
  const SaveOptions options = job_->save_options();
  if (job_->options.mode == AsyncMode::kDisabled) {
    try {
      job_->done(checkpoint::save(job_->options.folder, snapshot, options), start);
    } catch (const dtensor::CollectiveError& error) {
      job_->fail_lost(error.what());
    }
    return;
  }
  job_->staged = stage(snapshot, options, std::move(job_->staged.contents));
  std::packaged_task<void()> task([job = job_, options, start] {
    const fs::path saved = checkpoint::save(job->options.folder, job->staged, options);
    job->done(saved, start);
  });
  under_way_ = task.get_future();
  thread_ = std::thread(std::move(task));
}

// Ends with an error when there is no progress any more; by then the ranks' own limit has ended a
// wait for another rank.
void Saver::wait() {
  int64_t before = job_->progress;
  while (under_way_.wait_for(2 * job_->options.timeout) != std::future_status::ready) {
    const int64_t now = job_->progress;
    if (now == before) {
      job_->ended = true;
      thread_.detach();
      under_way_ = {};
      throw UserError(job_->given_up_text());
    }
    before = now;
  }
  thread_.join();
}

// Waits for the save under way and keeps what it failed with, if all ranks know of it.
void Saver::collect() {
  if (!under_way_.valid()) return;
  wait();
  try {
    under_way_.get();
  } catch (const dtensor::CollectiveError& error) {
    job_->fail_lost(error.what());
  } catch (const std::exception& error) {
    failure_ = error.what();
  }
}

std::optional<std::string> Saver::failure() {
  const bool ended = under_way_.valid() &&
                     under_way_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  if (ended) collect();
  return std::exchange(failure_, std::nullopt);
}

void Saver::finish() {
  collect();
  if (failure_) throw UserError(*std::exchange(failure_, std::nullopt));
}

}  // namespace longhaul::checkpoint
