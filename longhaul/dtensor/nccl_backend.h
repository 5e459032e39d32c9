// c10d's NCCL backend: tensors on CUDA devices, one device a rank. Only in builds with CUDA where
// NCCL's header was found; elsewhere the function says so.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace longhaul::dtensor {

struct NcclGroup {
  c10::intrusive_ptr<c10d::Store> store;  // the group's own (a PrefixStore)
  int rank = 0, size = 1;                 // within the group
  std::chrono::milliseconds timeout;
};

// The ranks connect at their first collective, on the device of its tensors. A collective is
// ordered on the device's current stream; one that does not end within the time limit ends the
// process. Throws Error in a build without NCCL.
c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const NcclGroup& group);

}  // namespace longhaul::dtensor
