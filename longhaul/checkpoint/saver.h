// The checkpoints of a run, as it goes: saved at once, or copied and saved while training goes on
// (checkpoint.async_mode). Older ones are deleted when a newer one is durable and, where it stays
// alone, has been read and compared with its checksums. Called by train/ from one thread; ranks
// call it together.
#pragma once

#include <functional>
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
  // For the slowest rank to write its share. A save that makes no progress for twice as long is
  // given up.
  std::chrono::milliseconds timeout{300'000};
};

class Saver {
 public:
  // `ranks` is a group of all ranks that nothing else uses, because the thread talks over it, and
  // whose time limit nothing else sets. `ranks_need` is what it needs to live
  // (World::shared_log()): a thread that was given up keeps it.
  Saver(SaverOptions options, dtensor::Communicator ranks, std::shared_ptr<const void> ranks_need);
  Saver(const Saver&) = delete;
  // Waits for a save under way, or gives it up. What it failed with goes to the log.
  ~Saver();

  // The run goes on from `step`: later checkpoints in the folder are another history, which stays
  // as it is and is not counted by keep_latest_k. Says so.
  void goes_on_from(int64_t step);

  // Saves, or starts to: then it returns when the copy is made. In both cases a thread writes, so
  // that a disk that hangs cannot hold the caller for ever. Waits first for a save under way;
  // if that failed and nobody has asked about it, the log says so. Throws what save() and stage()
  // throw, and, as the other two, what ends the run: UserError, which names rank, save and step, if
  // the one under way must be given up, and CollectiveError if the ranks have lost one another in
  // it. After either there is no saving any more. Any other failure is reported by failure() and
  // finish(), on all ranks, and the next save may succeed. With `keep_older` no older checkpoint is
  // deleted for it: who saves a state that may not be worth going on from says so.
  void save(const Snapshot& snapshot, bool keep_older = false);

  // The same for files of `step` in another form: `write` saves them, with these ranks and this
  // progress, and the caller waits for it in any mode. A thread that is given up keeps `write`,
  // which must own what it uses. Older checkpoints stay. Throws what `write` throws, too.
  void write_beside(int64_t step, std::function<void(const SaveOptions& options)> write);

  // What became of a save that has ended since the last call, if it failed. Each is told once.
  std::optional<std::string> failure();
  // Waits for a save under way, and for the deletion of older ones. UserError if the last one
  // failed and nobody has asked about it.
  void finish();

 private:
  struct Job;
  // One action at a time on a thread of its own.
  struct Task {
    std::thread thread;
    std::future<void> end;  // valid until what became of it is known
    void start(std::function<void()> action);
    bool under_way() const;
  };
  void begin(int64_t step);
  bool wait_for(Task& task);
  void end_writing();
  void end_save();
  void collect();
  void start_purging(int64_t saved_step);
  bool end_purging();

  // Shared with the threads, which outlive the Saver if they are given up.
  std::shared_ptr<Job> job_;
  Task saving_, purging_;
  bool keep_older_ = false;               // of the save under way
  std::optional<int64_t> skipped_purge_;  // after the save of this step: one was under way
  std::optional<std::string> failure_;    // of the last save
};

}  // namespace longhaul::checkpoint
