// SIGUSR2 to a rank: it writes what it communicated (dtensor/flight_recorder.h) and goes on. On a
// thread of its own, so that a rank that hangs answers, too.
#pragma once

#include <atomic>
#include <thread>

#include "longhaul/dtensor/flight_recorder.h"

namespace longhaul::cli {

// Before the process has threads, which inherit it, as programs that it becomes do: the signal
// waits for TraceOnSignal.
void block_trace_signal();
// The signal comes as any other, also one that waited.
void unblock_trace_signal();

// Answers the signal while it lives.
class TraceOnSignal {
 public:
  explicit TraceOnSignal(dtensor::FlightRecorder& recorder);
  TraceOnSignal(const TraceOnSignal&) = delete;
  ~TraceOnSignal();

 private:
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace longhaul::cli
