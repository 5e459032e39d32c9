#include "longhaul/ops/cpu_allocator.h"

#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <cstdlib>

namespace longhaul::ops {
namespace {

constexpr size_t kAlignment = 64;  // what libtorch's own allocator promises
constexpr size_t kRoom = kAlignment + sizeof(void*);

// The block that malloc gave stands right before the data.
void*& block_of(void* data) { return static_cast<void**>(data)[-1]; }

void free_data(void* data) {
  if (data) std::free(block_of(data));
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
    block_of(data) = block;
    return {data, data, &free_data, at::kCPU};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_data; }

  void copy_data(void* to, const void* from, size_t count) const override {
    default_copy_data(to, from, count);
  }
};

}  // namespace

void install_cpu_allocator() {
  static HeapAllocator allocator;
  c10::SetAllocator(at::kCPU, &allocator, /*priority=*/1);
}

}  // namespace longhaul::ops
