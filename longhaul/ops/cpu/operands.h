// What products are computed with: where an instruction set multiplies no pairs of bf16, values are
// widened to fp32 once instead of at every step of every product.
#pragma once

#include "longhaul/ops/cpu/simd.h"
#include "longhaul/ops/cpu/workspace.h"

namespace longhaul::cpu::LONGHAUL_ISA {

#if defined(__AVX512BF16__)
template <typename T>
using Operand = T;
#else
template <typename T>
using Operand = float;
#endif
template <typename T>
constexpr bool kWidened = sizeof(T) != sizeof(Operand<T>);

// A tensor of `count` elements, a multiple of 16, as operands.
template <typename T>
class Operands {
 public:
  Operands(const void* x, int64_t count, Workspace& workspace)
      : x_(static_cast<const T*>(x)),
        count_(count),
        widened_(workspace.take<float>(kWidened<T> ? count : 0)) {}

  // On all threads of the enclosing parallel region; ends with a barrier if it does anything.
  void widen() const {
    if constexpr (kWidened<T>) {
#pragma omp for schedule(static)
      for (int64_t i = 0; i < count_; i += kLanes) store(widened_ + i, load_as_floats(x_ + i));
    }
  }
  const Operand<T>* get() const {
    if constexpr (kWidened<T>) {
      return widened_;
    } else {
      return x_;
    }
  }

 private:
  const T* x_;
  int64_t count_;
  float* widened_;
};

}  // namespace longhaul::cpu::LONGHAUL_ISA
