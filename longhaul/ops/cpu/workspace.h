// Cuts a caller's workspace into aligned arrays. Without memory it only counts, so the same code
// tells how much is needed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace longhaul::cpu::LONGHAUL_ISA {

class Workspace {
 public:
  static constexpr size_t kAlignment = 64;

  // `memory` null: only count.
  explicit Workspace(void* memory) : base_(static_cast<char*>(memory)) {
    if (base_) used_ = (kAlignment - reinterpret_cast<uintptr_t>(base_) % kAlignment) % kAlignment;
  }

  template <typename T>
  T* take(int64_t count) {
    T* array = base_ ? reinterpret_cast<T*>(base_ + used_) : nullptr;
    used_ += (static_cast<size_t>(count) * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    return array;
  }

  size_t bytes() const { return used_ + kAlignment; }

 private:
  char* base_;
  size_t used_ = 0;
};

inline int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

}  // namespace longhaul::cpu::LONGHAUL_ISA
