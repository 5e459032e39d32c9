// SwiGLU, forward and backward in one pass each.
#include "include/longhaul/kernels.h"
#include "longhaul/ops/cpu/kernel_table.h"
#include "longhaul/ops/cpu/rows.h"
#include "longhaul/ops/cpu/sigmoid.h"

namespace longhaul::cpu::LONGHAUL_ISA {
namespace {

using Args = longhaul_swiglu_args;
using GradArgs = longhaul_swiglu_grad_args;

constexpr int64_t kRun = 4096;  // elements that a thread takes at a time

template <typename T, bool kStream>
void run(const Args& a, int64_t from, int64_t count) {
  const T *gate = static_cast<const T*>(a.gate) + from, *up = static_cast<const T*>(a.up) + from;
  T* y = static_cast<T*>(a.y) + from;
  write_row<kStream>(y, count, [&](int64_t i, auto part) {
    const Floats g = load_as_floats(gate + i, part);
    return g * sigmoid(g).of_x * load_as_floats(up + i, part);
  });
}

// d_up = dy silu(gate),   d_gate = dy up s (1 + gate (1 - s)) with s = sigmoid(gate).
template <typename T, bool kStream>
void run_grad(const GradArgs& a, int64_t from, int64_t count) {
  const T *gate = static_cast<const T*>(a.gate) + from, *up = static_cast<const T*>(a.up) + from;
  const T* dy = static_cast<const T*>(a.dy) + from;
  T* const results[] = {static_cast<T*>(a.d_gate) + from, static_cast<T*>(a.d_up) + from};
  write_rows<kStream>(results, count, [&](int64_t i, auto part) {
    const Floats g = load_as_floats(gate + i, part), d = load_as_floats(dy + i, part);
    const Sigmoid s = sigmoid(g);
    const Floats slope = s.of_x * (1.0F + g * s.of_minus_x);
    return Results<2>{{d * load_as_floats(up + i, part) * slope, d * (g * s.of_x)}};
  });
}

// f(from, count) for runs of n elements.
template <bool kStream, typename F>
void by_run(int64_t n, const F& f) {
  in_parallel<kStream>((n + kRun - 1) / kRun, kRun, [&](int64_t i) {
    const int64_t left = n - i * kRun;
    f(i * kRun, left < kRun ? left : kRun);
  });
}

}  // namespace

void swiglu(const Args& a) {
  const bool streamed = is_streamed(a.y, a.n * bytes_of(a.dtype), /*row_bytes=*/0);
  with_type(a.dtype, streamed, [&]<typename T, bool kStream>() {
    by_run<kStream>(a.n, [&](int64_t from, int64_t n) { run<T, kStream>(a, from, n); });
  });
}

void swiglu_grad(const GradArgs& a) {
  const int64_t bytes = a.n * bytes_of(a.dtype);
  const bool streamed = is_streamed(a.d_gate, bytes, 0) && is_streamed(a.d_up, bytes, 0);
  with_type(a.dtype, streamed, [&]<typename T, bool kStream>() {
    by_run<kStream>(a.n, [&](int64_t from, int64_t n) { run_grad<T, kStream>(a, from, n); });
  });
}

}  // namespace longhaul::cpu::LONGHAUL_ISA
