// The largest block of memory that a piece of a test asks libtorch's CPU allocator for. Workspaces
// of the kernels are tensors too.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <memory>

namespace longhaul::testing {

struct Allocations : c10::MemoryReportingInfoBase {
  void reportMemoryUsage(void*, int64_t bytes, size_t, size_t, c10::Device) override {
    largest = std::max(largest, bytes);
  }
  bool memoryProfilingEnabled() const override { return true; }
  int64_t largest = 0;
};

// In bytes, of what `f` allocates on this thread; backward passes of CPU tensors run on it.
template <typename F>
int64_t largest_allocation(const F& f) {
  const auto seen = std::make_shared<Allocations>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, seen);
  f();
  return seen->largest;
}

}  // namespace longhaul::testing
