// The most that the multiply-add instructions of a kernel can reach: a loop on registers alone.
#include <omp.h>

#include "longhaul/ops/cpu/kernel_table.h"
#include "longhaul/ops/cpu/simd.h"

namespace longhaul::cpu::LONGHAUL_ISA {
namespace {

// Enough to hide the latency of the instruction, and no more than the registers hold.
constexpr int kAccumulators = kParts == 1 ? 16 : 10;
constexpr int64_t kSteps = 1 << 20;

template <typename T>
float multiply_add(int64_t steps) {
  Register acc[kAccumulators];
  // Each its own start, or else all would be one and the same; every loop over them is unrolled, or
  // else they lie in memory, where the asm below may see them.
#pragma GCC unroll 16
  for (int j = 0; j < kAccumulators; ++j) acc[j] = Register{} + static_cast<float>(j);
  const RegisterWords one = RegisterWords{} + 0x3f803f80;  // 1, or about 1
  const RegisterWords operands[2] = {one, one};
  for (int64_t i = 0; i < steps; ++i) {
    asm volatile("" : : "r"(operands) : "memory");  // new values, as far as the compiler knows
    const RegisterWords a = operands[0], b = operands[1];
#pragma GCC unroll 16
    for (int j = 0; j < kAccumulators; ++j) acc[j] = dot<T>(acc[j], a, b);
  }
  Register total = {};
#pragma GCC unroll 16
  for (int j = 0; j < kAccumulators; ++j) total += acc[j];
  float sum = 0;
  for (int i = 0; i < kRegisterLanes; ++i) sum += total[i];
  return sum;
}

template <typename T>
double best_rate(double seconds) {
  double best = 0;
  const double end = omp_get_wtime() + seconds;
  while (omp_get_wtime() < end) {
    const double start = omp_get_wtime();
    float kept = 0;
#pragma omp parallel reduction(+ : kept)
    kept += multiply_add<T>(kSteps);
    asm volatile("" : : "x"(kept));
    const double flops =
        2.0 * kRegisterLanes * kPack<T> * kAccumulators * kSteps * omp_get_max_threads();
    const double rate = flops / (omp_get_wtime() - start);
    best = rate > best ? rate : best;
  }
  return best;
}

}  // namespace

double peak_flops(longhaul_dtype dtype, double seconds) {
  return dtype == LONGHAUL_FLOAT32 ? best_rate<float>(seconds) : best_rate<bf16>(seconds);
}

}  // namespace longhaul::cpu::LONGHAUL_ISA
