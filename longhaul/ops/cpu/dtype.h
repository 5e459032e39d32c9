// From a kernel's dtype to the type of its elements.
#pragma once

#include "include/longhaul/kernels.h"
#include "longhaul/ops/cpu/simd.h"

namespace longhaul::cpu::LONGHAUL_ISA {

// f<T>() for the elements of that dtype.
template <typename F>
auto with_dtype(longhaul_dtype dtype, const F& f) {
  return dtype == LONGHAUL_FLOAT32 ? f.template operator()<float>() : f.template operator()<bf16>();
}

}  // namespace longhaul::cpu::LONGHAUL_ISA
