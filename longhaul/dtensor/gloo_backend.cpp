#include "longhaul/dtensor/gloo_backend.h"

#include <cstdlib>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "longhaul/base/error.h"

namespace longhaul::dtensor {

GlooDevice make_gloo_device(const std::string& host) {
  using c10d::ProcessGroupGloo;
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
  auto options = c10d::ProcessGroupGloo::Options::create(group.timeout);
  options->devices = {group.device};
  return c10::make_intrusive<c10d::ProcessGroupGloo>(group.store, group.rank, group.size,
                                                     std::move(options));
}

}  // namespace longhaul::dtensor
