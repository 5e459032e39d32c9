// The checkpoints of a run, as it goes: saved at once, or copied and saved by a thread while
// training goes on (checkpoint.async_mode). Older ones are deleted when a newer one is durable.
// Called by train/ from one thread; ranks call it together.
#pragma once

#include <future>
#include <optional>

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
  std::chrono::milliseconds timeout{300'000};  // for the slowest rank to write its share
};

class Saver {
 public:
  // `ranks` is a group of all ranks that nothing else uses, because the thread talks over it.
  Saver(SaverOptions options, dtensor::Communicator ranks);
  Saver(const Saver&) = delete;
  // Waits for a save under way.
  ~Saver();

  // Saves, or starts to: then it returns when the copy is made. Waits first for a save under way.
  // Throws what save() and stage() throw; a save that fails after that is reported by failure() and
  // finish().
  void save(const Snapshot& snapshot);

  // What became of a save that has ended since the last call, if it failed. Each is told once.
  std::optional<std::string> failure();
  // Waits for a save under way. UserError if it failed, or one that nobody asked about.
  void finish();

 private:
  void done(const fs::path& saved, double seconds) const;
  void collect();

  const SaverOptions options_;
  dtensor::Communicator ranks_;
  StagedSnapshot staged_;
  std::future<void> under_way_;
  std::optional<std::string> failure_;
};

}  // namespace longhaul::checkpoint
