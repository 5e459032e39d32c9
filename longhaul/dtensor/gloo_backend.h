// c10d's gloo backend: ranks in processes or threads, over TCP. The only file that sees gloo's
// names (gloo_declarations/).
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <memory>
#include <string>

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace gloo::transport {
class Device;
}  // namespace gloo::transport

namespace longhaul::dtensor {

// What a rank's groups share: the network interface and the thread that serves its connections.
using GlooDevice = std::shared_ptr<gloo::transport::Device>;

// The interface that the local name or address `host` belongs to; empty: the one that this
// machine's name or the environment variable GLOO_SOCKET_IFNAME gives. Throws Error if there is
// none.
GlooDevice make_gloo_device(const std::string& host);

struct GlooGroup {
  c10::intrusive_ptr<c10d::Store> store;  // the group's own (a PrefixStore)
  GlooDevice device;
  int rank = 0, size = 1;  // within the group
  std::chrono::milliseconds timeout;
};

// Connects to the group's other ranks; all must call it. Throws what c10d throws if they do not
// within the time limit.
c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const GlooGroup& group);

}  // namespace longhaul::dtensor
