// RMSNorm, with a residual added before it or without: a row is read from memory once, the second
// time comes from the cache.
#include "include/longhaul/kernels.h"
#include "longhaul/ops/cpu/kernel_table.h"
#include "longhaul/ops/cpu/rows.h"
#include "longhaul/ops/cpu/workspace.h"

namespace longhaul::cpu::LONGHAUL_ISA {
namespace {

using Args = longhaul_rms_norm_args;
using GradArgs = longhaul_rms_norm_grad_args;

// The row that is normalised, a vector at a time: x, or with kAdd the sum of two as it is in
// memory.
template <bool kAdd, typename T, typename Part>
LONGHAUL_INLINE Floats summed(const T* x, const T* residual, int64_t i, Part part) {
  const Floats v = load_as_floats(x + i, part);
  if constexpr (kAdd) return as_rounded<T>(v + load_as_floats(residual + i, part));
  return v;
}

template <typename T, bool kStream, bool kAdd>
void normalize_row(const Args& a, int64_t row) {
  const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
  const T* residual = kAdd ? static_cast<const T*>(a.residual) + row * a.residual_stride : nullptr;
  const T* weight = static_cast<const T*>(a.weight);
  T* y = static_cast<T*>(a.y) + row * a.D;
  const float squares = sum_over(a.D, [&](int64_t i, auto part) LONGHAUL_INLINED {
    const Floats v = summed<kAdd>(x, residual, i, part);
    return v * v;
  });
  const float rstd = 1 / __builtin_sqrtf(squares / static_cast<float>(a.D) + a.eps);
  a.rstd[row] = rstd;
  const auto normed = [&](Floats v, int64_t i, auto part) LONGHAUL_INLINED {
    return as_rounded<T>(v * rstd) * load_as_floats(weight + i, part);
  };
  if constexpr (kAdd) {
    T* const results[] = {y, static_cast<T*>(a.sum) + row * a.D};
    write_rows<kStream>(results, a.D, [&](int64_t i, auto part) LONGHAUL_INLINED {
      const Floats v = summed<kAdd>(x, residual, i, part);
      return Results<2>{{normed(v, i, part), v}};
    });
  } else {
    write_row<kStream>(y, a.D, [&](int64_t i, auto part) LONGHAUL_INLINED {
      return normed(load_as_floats(x + i, part), i, part);
    });
  }
}

// With g = dy weight:  dx = rstd (g - x rstd^2 mean(g x)),  dweight += dy x rstd; with kAdd dsum on
// top of dx, after its rounding, as if each had been a tensor.
template <typename T, bool kStream, bool kAdd>
void add_gradients_of_row(const GradArgs& a, int64_t row, float* d_weight) {
  const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
  const T* dy = static_cast<const T*>(a.dy) + row * a.dy_stride;
  const T* d_sum = kAdd ? static_cast<const T*>(a.d_sum) + row * a.d_sum_stride : nullptr;
  const T* weight = static_cast<const T*>(a.weight);
  T* d_x = static_cast<T*>(a.d_x) + row * a.D;
  const float rstd = a.rstd[row];
  const float dot = sum_over(a.D, [&](int64_t i, auto part) LONGHAUL_INLINED {
    return load_as_floats(dy + i, part) * load_as_floats(weight + i, part) *
           (load_as_floats(x + i, part) * rstd);
  });
  const float along_x = rstd * (dot / static_cast<float>(a.D));
  write_row<kStream>(d_x, a.D, [&](int64_t i, auto part) LONGHAUL_INLINED {
    const Floats v = load_as_floats(x + i, part), d = load_as_floats(dy + i, part);
    const Floats g = d * load_as_floats(weight + i, part);
    store(d_weight + i, fma(d, v * rstd, load(d_weight + i)));
    // Of two products left to itself the compiler would fuse either with the subtraction.
    const Floats through_norm = fma(v, all(-along_x), g) * rstd;
    if constexpr (!kAdd) return through_norm;
    return as_rounded<T>(through_norm) + load_as_floats(d_sum + i, part);
  });
}

// Rows whose dweight is summed up on its own, so that the order of summation depends on nothing but
// the number of rows.
struct Blocks {
  int64_t rows, count, width;
  float* sums;  // [count][width]

  Blocks(const GradArgs& a, Workspace& workspace) {
    constexpr int64_t kMost = 128, kFewestRows = 16;
    rows = (a.rows + kMost - 1) / kMost;
    if (rows < kFewestRows) rows = kFewestRows;
    count = (a.rows + rows - 1) / rows;
    width = round_up(a.D, kLanes);
    sums = workspace.take<float>(count * width);
  }
};

template <typename T, bool kStream, bool kAdd>
void run_grad(const GradArgs& a, const Blocks& blocks) {
  in_parallel<kStream>(blocks.count, blocks.rows * a.D, [&](int64_t block) {
    float* sums = blocks.sums + block * blocks.width;
    std::memset(sums, 0, static_cast<size_t>(blocks.width) * sizeof *sums);
    const int64_t end = (block + 1) * blocks.rows;
    for (int64_t row = block * blocks.rows; row < (end < a.rows ? end : a.rows); ++row) {
      add_gradients_of_row<T, kStream, kAdd>(a, row, sums);
    }
  });
  in_parallel<false>(blocks.width / kLanes, blocks.count * kLanes, [&](int64_t lanes) {
    const int64_t i = lanes * kLanes, missing = a.D - i;
    Floats total = {};
    for (int64_t block = 0; block < blocks.count; ++block) {
      total += load(blocks.sums + block * blocks.width + i);
    }
    missing < kLanes ? put(a.d_weight + i, total, Part{missing})
                     : put(a.d_weight + i, total, Whole{});
  });
}

}  // namespace

void rms_norm(const Args& a) {
  const int64_t row_bytes = a.D * bytes_of(a.dtype), bytes = a.rows * row_bytes;
  const bool streamed =
      is_streamed(a.y, bytes, row_bytes) && (!a.residual || is_streamed(a.sum, bytes, row_bytes));
  with_type(a.dtype, streamed, [&]<typename T, bool kStream>() {
    in_parallel<kStream>(a.rows, a.D, [&](int64_t row) {
      a.residual ? normalize_row<T, kStream, true>(a, row)
                 : normalize_row<T, kStream, false>(a, row);
    });
  });
}

size_t rms_norm_grad_workspace(const GradArgs& a) {
  Workspace workspace(nullptr);
  const Blocks blocks(a, workspace);
  return workspace.bytes();
}

void rms_norm_grad(const GradArgs& a, void* memory) {
  Workspace workspace(memory);
  const Blocks blocks(a, workspace);
  const int64_t row_bytes = a.D * bytes_of(a.dtype);
  with_type(
      a.dtype, is_streamed(a.d_x, a.rows * row_bytes, row_bytes), [&]<typename T, bool kStream>() {
        a.d_sum ? run_grad<T, kStream, true>(a, blocks) : run_grad<T, kStream, false>(a, blocks);
      });
}

}  // namespace longhaul::cpu::LONGHAUL_ISA
