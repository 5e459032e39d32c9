// Rows of tokens to their experts and back. Both go through the tokens in order: a token's row is
// read or written once, its k rows at the experts come or go one stream each.
#include "include/longhaul/kernels.h"
#include "longhaul/ops/cpu/kernel_table.h"
#include "longhaul/ops/cpu/rows.h"

namespace longhaul::cpu::LONGHAUL_ISA {
namespace {

using PermuteArgs = longhaul_moe_token_permute_args;
using UnpermuteArgs = longhaul_moe_token_unpermute_args;

// Bit by bit: a conversion could flush denormals. Streamed rows are whole lines.
template <bool kStream, typename T>
LONGHAUL_INLINE void copy_row(const T* from, int64_t D, T* to) {
  if constexpr (kStream) {
    constexpr int64_t kStep = sizeof(Words) / sizeof(T);
    for (int64_t i = 0; i < D; i += kStep) stream_line(to + i, load_words(from + i));
  } else {
    std::memcpy(to, from, static_cast<size_t>(D) * sizeof(T));
  }
}

template <typename T, bool kStream>
void permute_token(const PermuteArgs& a, int64_t token) {
  const T* from = static_cast<const T*>(a.tokens) + token * a.D;
  for (int64_t choice = token * a.k; choice < (token + 1) * a.k; ++choice) {
    T* to = static_cast<T*>(a.permuted) + a.inverse[choice] * a.D;
    if (a.probs) {
      const float p = a.probs[choice];
      write_row<kStream>(to, a.D,
                         [&](int64_t i, auto part) { return load_as_floats(from + i, part) * p; });
    } else {
      copy_row<kStream>(from, a.D, to);
    }
    if (a.d_probs) {
      const T* row = static_cast<const T*>(a.rows) + a.inverse[choice] * a.D;
      a.d_probs[choice] = sum_over(a.D, [&](int64_t i, auto part) {
        return load_as_floats(from + i, part) * load_as_floats(row + i, part);
      });
    }
  }
}

// The weighed rows of a token at kVectors vectors from `column` on: a run of lines of each row,
// while those of the next token's rows are on their way.
template <typename T, bool kStream, int kVectors>
LONGHAUL_INLINE void add_columns(const UnpermuteArgs& a, int64_t token, int64_t column) {
  const T* permuted = static_cast<const T*>(a.permuted) + column;
  const int64_t first = token * a.k, next = token + 1 < a.T ? first + a.k : first;
  Floats sums[kVectors] = {};
  for (int64_t i = 0; i < a.k; ++i) {
    const T* row = permuted + a.inverse[first + i] * a.D;
    const T* coming = permuted + a.inverse[next + i] * a.D;
    const Floats p = all(a.probs ? a.probs[first + i] : 1);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      sums[v] = fma(load_as_floats(row + v * kLanes), p, sums[v]);
      if (v % kPack<T> == 0) __builtin_prefetch(coming + v * kLanes);
    }
  }
  T* out = static_cast<T*>(a.tokens) + token * a.D + column;
  if constexpr (kStream && kVectors % kPack<T> == 0) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; v += kPack<T>) {
      Floats line[kPack<T>];
      for (int i = 0; i < kPack<T>; ++i) line[i] = sums[v + i];
      stream_line(out + v * kLanes, line);
    }
  } else {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) store_rounded(out + v * kLanes, sums[v]);
  }
}

template <typename T, bool kStream>
void unpermute_token(const UnpermuteArgs& a, int64_t token) {
  constexpr int kVectors = 8;
  int64_t column = 0;
  for (; column + kVectors * kLanes <= a.D; column += kVectors * kLanes) {
    add_columns<T, kStream, kVectors>(a, token, column);
  }
  for (; column + kLanes <= a.D; column += kLanes) add_columns<T, kStream, 1>(a, token, column);
  if (column == a.D) return;
  const Part part = {a.D - column};
  Floats sum = {};
  for (int64_t i = token * a.k; i < (token + 1) * a.k; ++i) {
    const T* row = static_cast<const T*>(a.permuted) + a.inverse[i] * a.D;
    sum = fma(load_as_floats(row + column, part), all(a.probs ? a.probs[i] : 1), sum);
  }
  put(static_cast<T*>(a.tokens) + token * a.D + column, sum, part);
}

}  // namespace

void moe_token_permute(const PermuteArgs& a) {
  const int64_t row_bytes = a.D * bytes_of(a.dtype);
  with_type(a.dtype, is_streamed(a.permuted, a.T * a.k * row_bytes, row_bytes),
            [&]<typename T, bool kStream>() {
              in_parallel<kStream>(a.T, a.k * a.D,
                                   [&](int64_t token) { permute_token<T, kStream>(a, token); });
            });
}

void moe_token_unpermute(const UnpermuteArgs& a) {
  const int64_t row_bytes = a.D * bytes_of(a.dtype);
  with_type(a.dtype, is_streamed(a.tokens, a.T * row_bytes, row_bytes),
            [&]<typename T, bool kStream>() {
              in_parallel<kStream>(a.T, a.k * a.D,
                                   [&](int64_t token) { unpermute_token<T, kStream>(a, token); });
            });
}

}  // namespace longhaul::cpu::LONGHAUL_ISA
