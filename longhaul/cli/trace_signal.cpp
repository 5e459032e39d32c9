#include "longhaul/cli/trace_signal.h"

#include <pthread.h>

#include <csignal>

#include "longhaul/base/log.h"

namespace longhaul::cli {
namespace {

sigset_t trace_signal() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGUSR2);
  return signals;
}

}  // namespace

void block_trace_signal() {
  const sigset_t signals = trace_signal();
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
}

void unblock_trace_signal() {
  const sigset_t signals = trace_signal();
  pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
}

TraceOnSignal::TraceOnSignal(dtensor::FlightRecorder& recorder)
    : thread_([this, &recorder] {
        const sigset_t signals = trace_signal();
        for (int signal = 0; sigwait(&signals, &signal) == 0 && !stop_;) {
          if (const auto path = recorder.dump_asked("asked by SIGUSR2")) {
            log::info("collectives so far in {}", path->string());
          }
        }
      }) {}

TraceOnSignal::~TraceOnSignal() {
  stop_ = true;
  pthread_kill(thread_.native_handle(), SIGUSR2);
  thread_.join();
}

}  // namespace longhaul::cli
