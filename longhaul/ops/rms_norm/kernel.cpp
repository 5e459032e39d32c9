// RMSNorm: a row is read from memory once, the second time comes from the cache.
#include "include/longhaul/kernels.h"
#include "longhaul/ops/cpu/kernel_table.h"
#include "longhaul/ops/cpu/rows.h"
#include "longhaul/ops/cpu/workspace.h"

namespace longhaul::cpu::LONGHAUL_ISA {
namespace {

using Args = longhaul_rms_norm_args;
using GradArgs = longhaul_rms_norm_grad_args;

template <typename T, bool kStream>
void normalize_row(const Args& a, int64_t row) {
  const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
  const T* weight = static_cast<const T*>(a.weight);
  T* y = static_cast<T*>(a.y) + row * a.D;
  const float squares = sum_over(a.D, [&](int64_t i, auto part) {
    const Floats v = load_as_floats(x + i, part);
    return v * v;
  });
  const float rstd = 1 / __builtin_sqrtf(squares / static_cast<float>(a.D) + a.eps);
  a.rstd[row] = rstd;
  write_row<kStream>(y, a.D, [&](int64_t i, auto part) {
    const Floats normed = as_rounded<T>(load_as_floats(x + i, part) * rstd);
    return normed * load_as_floats(weight + i, part);
  });
}

// With g = dy weight:  dx = rstd (g - x rstd^2 mean(g x)),  dweight += dy x rstd.
template <typename T, bool kStream>
void add_gradients_of_row(const GradArgs& a, int64_t row, float* d_weight) {
  const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
  const T* dy = static_cast<const T*>(a.dy) + row * a.dy_stride;
  const T* weight = static_cast<const T*>(a.weight);
  T* d_x = static_cast<T*>(a.d_x) + row * a.D;
  const float rstd = a.rstd[row];
  const float dot = sum_over(a.D, [&](int64_t i, auto part) {
    return load_as_floats(dy + i, part) * load_as_floats(weight + i, part) *
           (load_as_floats(x + i, part) * rstd);
  });
  const float along_x = rstd * (dot / static_cast<float>(a.D));
  write_row<kStream>(d_x, a.D, [&](int64_t i, auto part) {
    const Floats v = load_as_floats(x + i, part), d = load_as_floats(dy + i, part);
    const Floats g = d * load_as_floats(weight + i, part);
    store(d_weight + i, fma(d, v * rstd, load(d_weight + i)));
    return (g - v * along_x) * rstd;
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

template <typename T, bool kStream>
void run_grad(const GradArgs& a, const Blocks& blocks) {
  in_parallel<kStream>(blocks.count, blocks.rows * a.D, [&](int64_t block) {
    float* sums = blocks.sums + block * blocks.width;
    std::memset(sums, 0, static_cast<size_t>(blocks.width) * sizeof *sums);
    const int64_t end = (block + 1) * blocks.rows;
    for (int64_t row = block * blocks.rows; row < (end < a.rows ? end : a.rows); ++row) {
      add_gradients_of_row<T, kStream>(a, row, sums);
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
  const int64_t row_bytes = a.D * bytes_of(a.dtype);
  with_type(
      a.dtype, is_streamed(a.y, a.rows * row_bytes, row_bytes), [&]<typename T, bool kStream>() {
        in_parallel<kStream>(a.rows, a.D, [&](int64_t row) { normalize_row<T, kStream>(a, row); });
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
  with_type(a.dtype, is_streamed(a.d_x, a.rows * row_bytes, row_bytes),
            [&]<typename T, bool kStream>() { run_grad<T, kStream>(a, blocks); });
}

}  // namespace longhaul::cpu::LONGHAUL_ISA
