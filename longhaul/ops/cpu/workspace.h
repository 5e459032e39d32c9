// Cuts a caller's workspace into aligned arrays. Without memory it only counts, so the same code
// tells how much is needed. Under AddressSanitizer, which sees a workspace as one piece, the space
// behind each array is poisoned, so that running over one into the next is reported.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace longhaul::cpu::LONGHAUL_ISA {

class Workspace {
 public:
  static constexpr size_t kAlignment = 64;

  // `memory` null: only count.
  explicit Workspace(void* memory) : base_(static_cast<char*>(memory)) {
    if (base_) used_ = (kAlignment - reinterpret_cast<uintptr_t>(base_) % kAlignment) % kAlignment;
  }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  ~Workspace() { set_poisoned(0, used_, false); }

  template <typename T>
  T* take(int64_t count) {
    T* array = base_ ? reinterpret_cast<T*>(base_ + used_) : nullptr;
    const size_t size = static_cast<size_t>(count) * sizeof(T);
    const size_t end = used_ + size;
    used_ += (size + kRedZone + kAlignment - 1) / kAlignment * kAlignment;
    set_poisoned(end, used_, true);
    return array;
  }

  size_t bytes() const { return used_ + kAlignment; }

 private:
#if defined(__SANITIZE_ADDRESS__)
  static constexpr size_t kRedZone = 512;
  void set_poisoned(size_t from, size_t to, bool poisoned) const {
    if (!base_) return;
    poisoned ? __asan_poison_memory_region(base_ + from, to - from)
             : __asan_unpoison_memory_region(base_ + from, to - from);
  }
#else
  static constexpr size_t kRedZone = 0;
  void set_poisoned(size_t, size_t, bool) const {}
#endif

  char* base_;
  size_t used_ = 0;
};

inline int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

}  // namespace longhaul::cpu::LONGHAUL_ISA
