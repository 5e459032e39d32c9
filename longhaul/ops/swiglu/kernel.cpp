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

// Elements from `column` on of a row.
struct Run {
  int64_t row, column, count;

  template <typename T>
  const T* in(const void* rows, int64_t stride) const {
    return static_cast<const T*>(rows) + row * stride + column;
  }
  template <typename T>
  T* out(void* rows, int64_t stride) const {
    return static_cast<T*>(rows) + row * stride + column;
  }
};

template <typename T, bool kStream>
void multiply(const Args& a, const Run& run) {
  const T *gate = run.in<T>(a.gate, a.gate_stride), *up = run.in<T>(a.up, a.up_stride);
  T* y = run.out<T>(a.y, a.D);
  write_row<kStream>(y, run.count, [&](int64_t i, auto part) LONGHAUL_INLINED {
    const Floats g = load_as_floats(gate + i, part);
    const Sigmoid s = sigmoid(g);
    return g * s.of_x * (load_as_floats(up + i, part) / s.divisor);
  });
}

// d_up = dy silu(gate),   d_gate = dy up s (1 + gate (1 - s)) with s = sigmoid(gate).
template <typename T, bool kStream>
void differentiate(const GradArgs& a, const Run& run) {
  const T *gate = run.in<T>(a.gate, a.gate_stride), *up = run.in<T>(a.up, a.up_stride);
  const T* dy = run.in<T>(a.dy, a.dy_stride);
  T* const results[] = {run.out<T>(a.d_gate, a.d_stride), run.out<T>(a.d_up, a.d_stride)};
  write_rows<kStream>(results, run.count, [&](int64_t i, auto part) LONGHAUL_INLINED {
    const Floats g = load_as_floats(gate + i, part), d = load_as_floats(dy + i, part);
    const Sigmoid s = sigmoid(g);
    const Floats inverse = 1.0F / s.divisor, of_x = s.of_x * inverse;
    const Floats slope = of_x * (1.0F + g * (s.of_minus_x * inverse));
    return Results<2>{{d * load_as_floats(up + i, part) * slope, d * (g * of_x)}};
  });
}

// f(run) for all elements.
template <bool kStream, typename F>
void by_run(int64_t rows, int64_t D, const F& f) {
  const int64_t runs = (D + kRun - 1) / kRun;
  in_parallel<kStream>(rows * runs, D < kRun ? D : kRun, [&](int64_t i) {
    const int64_t column = i % runs * kRun, left = D - column;
    f(Run{i / runs, column, left < kRun ? left : kRun});
  });
}

// Rows that follow each other are one long row.
template <typename AnyArgs>
AnyArgs joined(AnyArgs a, bool contiguous) {
  if (!contiguous) return a;
  a.D *= a.rows;
  a.rows = a.rows > 0 ? 1 : 0;
  return a;
}

// `stride` is that of what is written.
template <typename AnyArgs>
bool streams(const AnyArgs& a, const void* results, int64_t stride) {
  const int64_t row_bytes = a.rows == 1 ? 0 : stride * bytes_of(a.dtype);
  return is_streamed(results, a.rows * a.D * bytes_of(a.dtype), row_bytes);
}

}  // namespace

void swiglu(const Args& args) {
  const Args a = joined(args, args.gate_stride == args.D && args.up_stride == args.D);
  with_type(a.dtype, streams(a, a.y, a.D), [&]<typename T, bool kStream>() {
    by_run<kStream>(a.rows, a.D, [&](const Run& run) { multiply<T, kStream>(a, run); });
  });
}

void swiglu_grad(const GradArgs& args) {
  const GradArgs a = joined(args, args.dy_stride == args.D && args.gate_stride == args.D &&
                                      args.up_stride == args.D && args.d_stride == args.D);
  const bool streamed = streams(a, a.d_gate, a.d_stride) && streams(a, a.d_up, a.d_stride);
  with_type(a.dtype, streamed, [&]<typename T, bool kStream>() {
    by_run<kStream>(a.rows, a.D, [&](const Run& run) { differentiate<T, kStream>(a, run); });
  });
}

}  // namespace longhaul::cpu::LONGHAUL_ISA
