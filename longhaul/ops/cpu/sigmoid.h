// The logistic function of sixteen lanes, for gates and routers.
#pragma once

#include "longhaul/ops/cpu/simd.h"

namespace longhaul::cpu::LONGHAUL_ISA {

// As quotients, so that what comes next can be done while the divisor is still being computed.
struct Sigmoid {
  Floats of_x, of_minus_x;  // times the divisor, which they add up to
  Floats divisor;
};

LONGHAUL_INLINE Sigmoid sigmoid(Floats x) {
  const Floats small =
      exp2(Floats(Words(x) | all_words(INT32_MIN)) * kLog2E);  // e^-|x|: cannot overflow
  const Floats one = all(1.0F);
  const Words negative = Words(x) >> 31;
  return {choose(negative, small, one), choose(negative, one, small), 1.0F + small};
}

}  // namespace longhaul::cpu::LONGHAUL_ISA
