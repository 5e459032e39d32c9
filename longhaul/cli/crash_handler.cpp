#include "longhaul/cli/crash_handler.h"

#include <csignal>

#include "longhaul/base/progress.h"

namespace longhaul::cli {
namespace {

void leave(int signal) {
  ProgressLine::leave_terminal_sane();
  std::raise(signal);  // its handler is gone, so that it ends the process on return
}

}  // namespace

void end_sanely_on(int signal) {
  struct sigaction action {};
  action.sa_handler = leave;
  action.sa_flags = SA_RESETHAND;
  sigaction(signal, &action, nullptr);
}

void install_crash_handler() {
  for (const int signal : {SIGSEGV, SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGINT, SIGTERM}) {
    struct sigaction before {};
    sigaction(signal, nullptr, &before);
    if (before.sa_handler == SIG_DFL) end_sanely_on(signal);
  }
}

}  // namespace longhaul::cli
