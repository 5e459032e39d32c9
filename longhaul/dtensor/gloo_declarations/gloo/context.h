// The names of gloo's context and transport that c10d's header of gloo mentions. libtorch_cpu holds
// the definitions; nothing of gloo is made by this program itself.
#pragma once

#include <chrono>
#include <memory>

namespace gloo {

class Context {
 public:
  void setTimeout(std::chrono::milliseconds);
};

namespace transport {
class Device;
class UnboundBuffer;
}  // namespace transport

}  // namespace gloo
