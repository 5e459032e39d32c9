// The terms of the indexer's loss; nothing outside this folder includes it.
#pragma once

#include "longhaul/ops/cpu/simd.h"

namespace longhaul::cpu::LONGHAUL_ISA {

struct Divergence {
  Floats loss;      // in base 2
  Floats d_scores;  // r - p
};

// Of keys with the target p and the score x, in base 2 and less the row's largest; sum is that of
// 2^x over the row. Since p and r both sum to 1, the loss is also the sum of r - p - p log(r / p),
// whose terms do not cancel where r is close to p.
LONGHAUL_INLINE Divergence divergence_at(Floats x, Floats p, Floats inverse_sum, Floats log_sum) {
  const Floats r = exp2(x) * inverse_sum, ratio = r / max(p, all(1.2e-38F));
  const Mask close = greater(ratio, all(0.5F)) & greater(all(2.0F), ratio);
  const Floats log_ratio = select(close, log2(select(close, ratio, all(1.0F))),
                                  x - log_sum - log2(max(p, all(1.2e-38F))));
  const Floats cross = select(greater(p, Floats{}), p * log_ratio, Floats{});
  return {.loss = (r - p) * kLog2E - cross, .d_scores = r - p};
}

}  // namespace longhaul::cpu::LONGHAUL_ISA
