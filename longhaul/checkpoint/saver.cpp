#include "longhaul/checkpoint/saver.h"

#include <atomic>
#include <chrono>

#include "longhaul/base/log.h"
#include "longhaul/base/text.h"

namespace longhaul::checkpoint {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace

// One save after another.
struct Saver::Job {
  SaverOptions options;
  dtensor::Communicator ranks;
  StagedSnapshot staged;
  int64_t number = 0;                    // of the save, from 1
  std::atomic<int64_t> written_bytes{};  // of the save under way

  SaveOptions save_options() {
    return {.ranks = &ranks,
            .pin_memory = options.mode == AsyncMode::kPinned,
            .progress = [this](int64_t bytes) { written_bytes = bytes; }};
  }
  void done(const fs::path& saved, Clock::time_point start) const {
    if (ranks.rank() != 0) return;
    checkpoint::purge(options.folder, options.keep_latest_k);
    log::info("saved {} in {}", saved.string(), human_seconds(seconds_since(start)));
  }
  std::string given_up_text() const {
    return fmt::format(
        "rank {}: save {} (step {}): nothing was written to '{}' for {}, and it was given up: the "
        "disk hangs or is too slow; look at it, or raise comm.init_timeout_seconds",
        ranks.global_rank(), number, staged.snapshot.step, options.folder.string(),
        human_seconds(2 * std::chrono::duration<double>(options.timeout).count()));
  }
};

Saver::Saver(SaverOptions options, dtensor::Communicator ranks)
    : job_(new Job{std::move(options), std::move(ranks), {}}) {}

Saver::~Saver() {
  try {
    collect();
  } catch (const UserError& error) {
    log::error("{}", error.what());
  }
}

void Saver::save(const Snapshot& snapshot) {
  const auto start = Clock::now();
  collect();
  job_->number += 1;
  job_->ranks.set_timeout(job_->options.timeout);
  const SaveOptions options = job_->save_options();
  if (job_->options.mode == AsyncMode::kDisabled) {
    job_->done(checkpoint::save(job_->options.folder, snapshot, options), start);
    return;
  }
  job_->staged = stage(snapshot, options, std::move(job_->staged.contents));
  job_->written_bytes = 0;
  std::packaged_task<void()> task([job = job_, options, start] {
    job->done(checkpoint::save(job->options.folder, job->staged, options), start);
  });
  under_way_ = task.get_future();
  thread_ = std::thread(std::move(task));
}

// Ends with an error when nothing is written any more; by then the ranks' own limit has ended a
// wait for another rank.
void Saver::wait() {
  int64_t before = job_->written_bytes;
  while (under_way_.wait_for(2 * job_->options.timeout) != std::future_status::ready) {
    const int64_t now = job_->written_bytes;
    if (now == before) {
      thread_.detach();
      under_way_ = {};
      throw UserError(job_->given_up_text());
    }
    before = now;
  }
  thread_.join();
}

// Waits for the save under way and keeps what it failed with.
void Saver::collect() {
  if (!under_way_.valid()) return;
  wait();
  try {
    under_way_.get();
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
