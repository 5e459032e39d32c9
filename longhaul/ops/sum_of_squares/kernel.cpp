// The sum of squares of many arrays: a sum for each piece, and these in order.
#include "include/longhaul/kernels.h"
#include "longhaul/ops/cpu/kernel_table.h"
#include "longhaul/ops/cpu/pieces.h"
#include "longhaul/ops/cpu/rows.h"
#include "longhaul/ops/cpu/workspace.h"

namespace longhaul::cpu::LONGHAUL_ISA {
namespace {

using Args = longhaul_sum_of_squares_args;
using Doubles = double __attribute__((vector_size(64)));
using HalfFloats = float __attribute__((vector_size(32)));

// Squares of fp32 are exact in fp64 and cannot overflow there.
LONGHAUL_INLINE void add_squares(Floats x, Doubles& low, Doubles& high) {
  HalfFloats halves[2];
  std::memcpy(halves, &x, sizeof x);
  const Doubles a = __builtin_convertvector(halves[0], Doubles);
  const Doubles b = __builtin_convertvector(halves[1], Doubles);
  low += a * a;
  high += b * b;
}

template <typename T>
double squares_of(const T* x, int64_t n) {
  Doubles sums[4] = {};
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    add_squares(load_as_floats(x + i), sums[0], sums[1]);
    add_squares(load_as_floats(x + i + kLanes), sums[2], sums[3]);
  }
  for_lanes(n - i, [&](int64_t rest, auto part) {
    add_squares(load_as_floats(x + i + rest, part), sums[0], sums[1]);
  });
  const Doubles all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  double sum = 0;
  for (int lane = 0; lane < 8; ++lane) sum += all[lane];
  return sum;
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
