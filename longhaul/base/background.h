// Actions one after another beside their caller, one at a time, for work that waits for disks. The
// caller goes on after an error, for others may need its part in what they do together. Called by
// whoever writes files.
#pragma once

#include <exception>
#include <functional>
#include <future>

namespace longhaul {

class Background {
 public:
  // Waits for the action before, then starts this one on a thread. After an error nothing is run.
  void run(std::function<void()> action);
  // Waits for the action before, then runs this one on the caller's thread: for what takes less
  // time than a thread, or must be done there. Keeps its error, too.
  void run_here(const std::function<void()>& action);
  // Waits. Throws the first error.
  void finish();
  // Whether an action has failed that was waited for.
  bool failed() const { return failure_ != nullptr; }

 private:
  void wait();

  std::future<void> under_way_;  // its end waits, too
  std::exception_ptr failure_;
};

}  // namespace longhaul
