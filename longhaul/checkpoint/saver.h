// The checkpoints of a run, as it goes: saved at once, or copied and saved by a thread while
// training goes on (checkpoint.async_mode). Older ones are deleted when a newer one is durable.
// Called by train/ from one thread; ranks call it together.
#pragma once

#include <future>
#include <memory>
#include <optional>
#include <thread>

#include "longhaul/checkpoint/checkpoint.h"

namespace longhaul::checkpoint {

enum class AsyncMode {
  kDisabled,
  kCopy,    // "async"
  kPinned,  // "async_with_pinned_mem": as kCopy, into memory that a CUDA device reaches
};

struct SaverOptions {
  fs::path folder;
  int keep_latest_k = 0;  // 0: all
  AsyncMode mode = AsyncMode::kDisabled;
  // For the slowest rank to write its share. A save in which nothing is written for twice as long
  // is given up.
  std::chrono::milliseconds timeout{300'000};
};

class Saver {
 public:
  // `ranks` is a group of all ranks that nothing else uses, because the thread talks over it.
  Saver(SaverOptions options, dtensor::Communicator ranks);
  Saver(const Saver&) = delete;
  // Waits for a save under way, or gives it up with a line in the log.
  ~Saver();

  // Saves, or starts to: then it returns when the copy is made. Waits first for a save under way.
  // Throws what save() and stage() throw, and UserError, which names rank, save and step, if the
  // one under way must be given up; a save that fails after that is reported by failure() and
  // finish().
  void save(const Snapshot& snapshot);

  // What became of a save that has ended since the last call, if it failed. Each is told once.
  std::optional<std::string> failure();
  // Waits for a save under way. UserError if it failed, or one that nobody asked about.
  void finish();

 private:
  struct Job;
  void wait();
  void collect();

  // Shared with the thread, which outlives the Saver if it was given up.
  std::shared_ptr<Job> job_;
  std::thread thread_;
  std::future<void> under_way_;
  std::optional<std::string> failure_;
};

}  // namespace longhaul::checkpoint
