// The logistic function of sixteen lanes, for gates and routers.
#pragma once

#include "longhaul/ops/cpu/simd.h"

namespace longhaul::cpu::LONGHAUL_ISA {

struct Sigmoid {
  Floats of_x, of_minus_x;  // which add up to 1
};

LONGHAUL_INLINE Sigmoid sigmoid(Floats x) {
  const Floats small =
      exp2(Floats(Words(x) | all_words(INT32_MIN)) * kLog2E);  // e^-|x|: cannot overflow
  const Floats large_part = 1.0F / (1.0F + small), small_part = small * large_part;
  const Mask positive = greater(x, Floats{});
  return {select(positive, large_part, small_part), select(positive, small_part, large_part)};
}

}  // namespace longhaul::cpu::LONGHAUL_ISA
