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
constexpr int kPackOperand = kPack<Operand<T>>;  // elements of a word
template <typename T>
constexpr bool kWidened = sizeof(T) != sizeof(Operand<T>);

// Elements of a tensor as operands: runs of as many, a multiple of 16, that lie `stride` elements
// apart; widened they lie one behind the other.
template <typename T>
class Operands {
 public:
  Operands(const void* x, int64_t runs, int64_t length, int64_t stride, Workspace& workspace)
      : x_(static_cast<const T*>(x)),
        runs_(runs),
        length_(length),
        stride_(stride),
        widened_(workspace.take<float>(kWidened<T> ? runs * length : 0)) {}
  Operands(const void* x, int64_t count, Workspace& workspace)
      : Operands(x, 1, count, 0, workspace) {}

  // On all threads of the enclosing parallel region; ends with a barrier if it does anything.
  void widen() const {
    if constexpr (kWidened<T>) {
      const int64_t vectors = length_ / kLanes;
#pragma omp for schedule(static)
      for (int64_t i = 0; i < runs_ * vectors; ++i) {
        const T* from = x_ + i / vectors * stride_ + i % vectors * kLanes;
        store(widened_ + i * kLanes, load_as_floats(from));
      }
    }
  }
  const Operand<T>* get(int64_t run = 0) const {
    if constexpr (kWidened<T>) {
      return widened_ + run * length_;
    } else {
      return x_ + run * stride_;
    }
  }

 private:
  const T* x_;
  int64_t runs_, length_, stride_;
  float* widened_;
};

}  // namespace longhaul::cpu::LONGHAUL_ISA
