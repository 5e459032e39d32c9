// Softmax and cross-entropy of a tile of logits: read once for the maximum and the sum, in blocks
// that stay in the first cache between the two, and once more for the gradient that replaces it.
#include "include/longhaul/kernels.h"
#include "longhaul/ops/cpu/kernel_table.h"
#include "longhaul/ops/cpu/rows.h"

namespace longhaul::cpu::LONGHAUL_ISA {
namespace {

using Args = longhaul_cross_entropy_args;

constexpr int64_t kBlock = 2048;
// What a row without a finite logit has as its maximum; finite, so that it can be subtracted.
constexpr float kLowest = -3.402823466e38F;

// sum over i of e^(x_i - max).
struct Softmax {
  float max = kLowest, sum = 0;
};

// A NaN may get lost here; the exponentials keep it.
template <typename T>
LONGHAUL_INLINE float largest_of(const T* x, int64_t n) {
  constexpr int kSide = 4;
  Floats most[kSide];
  for (auto& m : most) m = all(kLowest);
  int64_t i = 0;
  for (; i + kSide * kLanes <= n; i += kSide * kLanes) {
#pragma GCC unroll 4
    for (int j = 0; j < kSide; ++j) most[j] = max(most[j], load_as_floats(x + i + j * kLanes));
  }
  float rest = kLowest;
  for (; i + kLanes <= n; i += kLanes) most[0] = max(most[0], load_as_floats(x + i));
  for (; i < n; ++i) {
    const float v = load_as_floats(x + i, Part{1})[0];
    rest = v > rest ? v : rest;
  }
  const float whole = largest(max(max(most[0], most[1]), max(most[2], most[3])));
  return whole > rest ? whole : rest;
}

// The lanes behind a part are zeros that must not count.
LONGHAUL_INLINE Floats counted(Floats v, Whole) { return v; }
LONGHAUL_INLINE Floats counted(Floats v, Part part) {
  return select(first_lanes(part.count), v, Floats{});
}

template <typename T>
Softmax softmax_of(const T* x, int64_t n) {
  Softmax s;
  for (int64_t from = 0; from < n; from += kBlock) {
    const int64_t count = n - from < kBlock ? n - from : kBlock;
    const float before = s.max, here = largest_of(x + from, count);
    s.max = here > before ? here : before;
    const float sum = sum_over(count, [&](int64_t i, auto part) LONGHAUL_INLINED {
      return counted(exp2((load_as_floats(x + from + i, part) - s.max) * kLog2E), part);
    });
    s.sum = s.sum * __builtin_expf(before - s.max) + sum;
  }
  return s;
}

// softmax - onehot(label). In bf16 the label's element is rounded after the subtraction.
template <typename T>
void write_gradient(T* x, int64_t n, const Softmax& s, int64_t label) {
  const float label_logit = load_as_floats(x + label, Part{1})[0];
  const Floats inverse = all(1 / s.sum);
  for_lanes(n, [&](int64_t i, auto part) LONGHAUL_INLINED {
    put(x + i, exp2((load_as_floats(x + i, part) - s.max) * kLog2E) * inverse, part);
  });
  const Floats p = exp2((all(label_logit) - s.max) * kLog2E) * inverse;
  put(x + label, p - 1.0F, Part{1});
}

template <typename T>
void run_row(const Args& a, int64_t row) {
  T* x = static_cast<T*>(a.logits) + row * a.stride;
  const int64_t label = a.labels[row];
  if (label < 0) {
    a.loss[row] = 0;
    if (a.gradient) std::memset(x, 0, static_cast<size_t>(a.V) * sizeof(T));
    return;
  }
  const Softmax s = softmax_of(x, a.V);
  a.loss[row] = __builtin_logf(s.sum) + (s.max - load_as_floats(x + label, Part{1})[0]);
  if (a.gradient) write_gradient(x, a.V, s, label);
}

}  // namespace

void cross_entropy(const Args& a) {
  with_type(a.dtype, /*streamed=*/false, [&]<typename T, bool kStream>() {
    in_parallel<kStream>(a.rows, a.V, [&](int64_t row) { run_row<T>(a, row); });
  });
}

}  // namespace longhaul::cpu::LONGHAUL_ISA
