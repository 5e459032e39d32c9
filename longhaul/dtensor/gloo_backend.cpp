#include "longhaul/dtensor/gloo_backend.h"

#include <pthread.h>
#include <signal.h>

#include <cstdlib>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "longhaul/base/error.h"

namespace longhaul::dtensor {
namespace {

// Gloo writes to connections that the other rank may have closed, and the signal for it would end
// the process. Blocked while its threads are made, it stays blocked in them, and the write fails
// with an error that names the connection. The rest of the process keeps its own setting.
class SigpipeBlocked {
 public:
  SigpipeBlocked() {
    sigemptyset(&sigpipe_);
    sigaddset(&sigpipe_, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &sigpipe_, &before_);
  }
  SigpipeBlocked(const SigpipeBlocked&) = delete;
  ~SigpipeBlocked() {
    const timespec now{};
    while (!sigismember(&before_, SIGPIPE) && sigtimedwait(&sigpipe_, nullptr, &now) == SIGPIPE) {
    }
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }

 private:
  sigset_t sigpipe_, before_;
};

}  // namespace

GlooDevice make_gloo_device(const std::string& host) {
  using c10d::ProcessGroupGloo;
  const SigpipeBlocked blocked;
  const char* interface = std::getenv("GLOO_SOCKET_IFNAME");
  try {
    if (interface != nullptr && host.empty()) {
      return ProcessGroupGloo::createDeviceForInterface(interface);
    }
    return host.empty() ? ProcessGroupGloo::createDefaultDevice()
                        : ProcessGroupGloo::createDeviceForHostname(host);
  } catch (const std::exception& error) {
    throw Error(fmt::format(
        "gloo finds no network interface for {} ({}); set GLOO_SOCKET_IFNAME to one of `ip link`",
        !host.empty() ? host : interface ? interface : "this machine's name", error.what()));
  }
}

c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const GlooGroup& group) {
  const SigpipeBlocked blocked;
  auto options = c10d::ProcessGroupGloo::Options::create(group.timeout);
  options->devices = {group.device};
  return c10::make_intrusive<c10d::ProcessGroupGloo>(group.store, group.rank, group.size,
                                                     std::move(options));
}

}  // namespace longhaul::dtensor
