#include "longhaul/ops/cpu_allocator.h"

#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>

namespace longhaul::ops {
namespace {

constexpr size_t kAlignment = 64;  // what libtorch's own allocator promises

// Stands right before the data.
struct Header {
  void* block;  // what malloc gave
  int64_t bytes;
};
constexpr size_t kRoom = kAlignment + sizeof(Header);

Header& header_of(void* data) { return static_cast<Header*>(data)[-1]; }

// libtorch calls the allocator without an object of ours, so that these cannot be members.
std::atomic<int64_t> held_bytes{0}, most_bytes{0};

// `change` is negative where memory is given back.
void count(void* data, int64_t change) {
  constexpr auto kOrder = std::memory_order_relaxed;
  const int64_t held = held_bytes.fetch_add(change, kOrder) + change;
  int64_t most = most_bytes.load(kOrder);
  while (held > most && !most_bytes.compare_exchange_weak(most, held, kOrder)) {
  }
  if (!c10::memoryProfilingEnabled()) return;
  c10::reportMemoryUsageToProfiler(data, change, static_cast<size_t>(held), /*total_reserved=*/0,
                                   at::kCPU);
}

void free_data(void* data) {
  if (!data) return;
  count(data, -header_of(data).bytes);
  std::free(header_of(data).block);
}

class HeapAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &free_data, at::kCPU};
    void* block = bytes > SIZE_MAX - kRoom ? nullptr : std::malloc(bytes + kRoom);
    if (!block) {
      C10_THROW_ERROR(OutOfMemoryError, c10::str("a tensor of ", bytes, " bytes"));
    }
    const auto place = reinterpret_cast<uintptr_t>(block) + kRoom;
    void* data = reinterpret_cast<void*>(place / kAlignment * kAlignment);
    header_of(data) = {block, static_cast<int64_t>(bytes)};
    count(data, static_cast<int64_t>(bytes));
    return {data, data, &free_data, at::kCPU};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_data; }

  void copy_data(void* to, const void* from, size_t count) const override {
    default_copy_data(to, from, count);
  }
};

}  // namespace

int64_t most_cpu_tensor_bytes() { return most_bytes.load(std::memory_order_relaxed); }

void restart_most_cpu_tensor_bytes() { most_bytes = held_bytes.load(); }

void install_cpu_allocator() {
  static HeapAllocator allocator;
  c10::SetAllocator(at::kCPU, &allocator, /*priority=*/1);
}

}  // namespace longhaul::ops
