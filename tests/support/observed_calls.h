// What a profiler would see of the calling thread: how often operators ran, and how many bytes of
// tensors are alive.
#pragma once

#include <ATen/record_function.h>
#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <map>
#include <memory>
#include <string>

namespace longhaul::testing {

// Counts operators by name ("aten::mm", "longhaul::sparse_flash_attention") while it lives.
class OperatorCalls {
 public:
  OperatorCalls() : outer_(current()) {
    current() = this;
    handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(&count));
  }
  OperatorCalls(const OperatorCalls&) = delete;
  ~OperatorCalls() {
    at::removeCallback(handle_);
    current() = outer_;
  }
  int64_t of(const std::string& name) const {
    const auto found = counts_.find(name);
    return found == counts_.end() ? 0 : found->second;
  }
  // Products of two matrices or batches of them, whichever library takes them.
  int64_t products() const { return of("longhaul::matmul") + of("aten::mm") + of("aten::bmm"); }

 private:
  static OperatorCalls*& current() {
    static thread_local OperatorCalls* calls = nullptr;
    return calls;
  }
  static std::unique_ptr<at::ObserverContext> count(const at::RecordFunction& function) {
    if (current() != nullptr) ++current()->counts_[function.name()];
    return nullptr;
  }

  OperatorCalls* outer_;
  at::CallbackHandle handle_;
  std::map<std::string, int64_t> counts_;
};

// Bytes of CPU tensors that the calling thread has allocated and not freed since this began.
class LiveBytes {
 public:
  int64_t now() const { return info_->bytes; }

 private:
  struct Info : c10::MemoryReportingInfoBase {
    void reportMemoryUsage(void* /*ptr*/, int64_t size, size_t /*allocated*/, size_t /*reserved*/,
                           c10::Device /*device*/) override {
      bytes += size;
    }
    bool memoryProfilingEnabled() const override { return true; }
    int64_t bytes = 0;
  };

  std::shared_ptr<Info> info_ = std::make_shared<Info>();
  c10::DebugInfoGuard guard_{c10::DebugInfoKind::PROFILER_STATE, info_};
};

}  // namespace longhaul::testing
