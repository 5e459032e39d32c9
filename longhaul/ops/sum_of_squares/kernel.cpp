// The sum of squares of many arrays: a sum for each piece, and these in order.
#include "include/longhaul/kernels.h"
#include "longhaul/ops/cpu/kernel_table.h"
#include "longhaul/ops/cpu/pieces.h"
#include "longhaul/ops/cpu/rows.h"
#include "longhaul/ops/cpu/workspace.h"

namespace longhaul::cpu::LONGHAUL_ISA {
namespace {

using Args = longhaul_sum_of_squares_args;
using Doubles = double __attribute__((vector_size(4 * kRegisterLanes)));  // a register
using HalfRegister = float __attribute__((vector_size(2 * kRegisterLanes)));

// Squares of fp32 are exact in fp64 and cannot overflow there.
struct Sums {
  Doubles of[2 * kParts] = {};

  LONGHAUL_INLINE void add(Floats x) {
    HalfRegister halves[2 * kParts];
    std::memcpy(halves, &x, sizeof x);
#pragma GCC unroll 8
    for (int i = 0; i < 2 * kParts; ++i) {
      const Doubles wide = __builtin_convertvector(halves[i], Doubles);
      of[i] += wide * wide;
    }
  }
};

template <typename T>
double squares_of(const T* x, int64_t n) {
  Sums sums[2];
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    sums[0].add(load_as_floats(x + i));
    sums[1].add(load_as_floats(x + i + kLanes));
  }
  for_lanes(n - i, [&](int64_t rest, auto part)
                       LONGHAUL_INLINED { sums[0].add(load_as_floats(x + i + rest, part)); });
  double total = 0;
  for (int j = 0; j < 2 * kParts; ++j) {
    const Doubles both = sums[0].of[j] + sums[1].of[j];
    for (int lane = 0; lane < kRegisterLanes / 2; ++lane) total += both[lane];
  }
  return total;
}

int64_t pieces(const Args& a) {
  return count_pieces(a.count, [&](int64_t i) { return a.arrays[i].n; });
}

}  // namespace

size_t sum_of_squares_workspace(const Args& a) {
  Workspace workspace(nullptr);
  workspace.take<double>(pieces(a));
  return workspace.bytes();
}

void sum_of_squares(const Args& a, void* memory) {
  Workspace workspace(memory);
  const int64_t count = pieces(a);
  double* sums = workspace.take<double>(count);
  in_pieces(
      a.count, [&](int64_t i) { return a.arrays[i].n; },
      [&](int64_t i, int64_t from, int64_t n, int64_t piece) {
        with_type(a.arrays[i].dtype, /*streamed=*/false, [&]<typename T, bool kStream>() {
          sums[piece] = squares_of(static_cast<const T*>(a.arrays[i].data) + from, n);
        });
      });
  *a.sum = 0;
  for (int64_t piece = 0; piece < count; ++piece) *a.sum += sums[piece];
}

}  // namespace longhaul::cpu::LONGHAUL_ISA
