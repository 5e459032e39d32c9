// The building blocks of the kernels whose heads have keys and values of their own: one query's
// vector of a head and that head's rows at the selected keys. The dims of a row lie on the lanes.
#pragma once

#include "longhaul/ops/cpu/key_list.h"
#include "longhaul/ops/cpu/tile.h"
#include "longhaul/ops/cpu/workspace.h"

namespace longhaul::cpu::LONGHAUL_ISA {

// Queries of a task. A head's keys, which neighbours share for the most part, stay in the cache
// from one query to the next.
constexpr int64_t kQueries = 32;

// The rows of one head in one row of the batch: one for each key, `bytes` apart.
struct HeadRows {
  const char* base;
  int64_t bytes;

  // Of x, whose rows are `stride` elements apart, H of them a key.
  template <typename T>
  static HeadRows of(const T* x, int64_t stride, int64_t L, int64_t H, int64_t b, int64_t h) {
    return {reinterpret_cast<const char*>(x + (b * L * H + h) * stride),
            H * stride * static_cast<int64_t>(sizeof(T))};
  }
};

// The products of 16 rows with x, D elements each: a lane a row.
template <typename T>
LONGHAUL_INLINE Floats multiply_rows(const char* const* rows, const T* x, int64_t D) {
  constexpr int kRows = 8;  // at once: as many pointers as registers hold
  const int64_t bytes = D * static_cast<int64_t>(sizeof(T));
  Floats products[kLanes] = {};
  for (int first = 0; first < kLanes; first += kRows) {
    Register sums[kRows] = {};
    const char* row[kRows];
    for (int r = 0; r < kRows; ++r) row[r] = rows[first + r];
    for (int64_t at = 0; at < bytes; at += 4 * kRegisterLanes) {
      const auto words = load_as<RegisterWords>(reinterpret_cast<const char*>(x) + at);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        sums[r] = dot<T>(sums[r], load_as<RegisterWords>(row[r] + at), words);
      }
    }
    for (int r = 0; r < kRows; ++r) store_as(&products[first + r], sums[r]);
  }
  return sums_of_lanes(products);
}

// sums [D / 32][2][16 lanes] += sum over keys of weights * row, for 32 C columns; as many weights
// and rows as kPack<T> divides.
template <typename T, int C>
LONGHAUL_INLINE void add_weighted_columns(const char* const* rows, int keys, const T* weights,
                                          int64_t column, float* sums) {
  for (int part = 0; part < kParts; ++part) {
    Register acc[C][2];
    load_tile<kLanes>(acc, sums + column + part * kRegisterLanes, kColumns);
    for (int key = 0; key < keys; key += kPack<T>) {
      const auto weight = broadcast_word(weights + key);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        RegisterWords x[2];
        load_columns<T>(rows + key, column + c * kColumns, part, x);
        acc[c][0] = dot<T>(acc[c][0], x[0], weight);
        acc[c][1] = dot<T>(acc[c][1], x[1], weight);
      }
    }
    store_tile<kLanes>(acc, sums + column + part * kRegisterLanes, kColumns);
  }
}
template <typename T>
LONGHAUL_INLINE void add_weighted_rows(const char* const* rows, int keys, const T* weights,
                                       int64_t D, float* sums) {
  constexpr int kAtOnce = 4;
  int64_t column = 0;
  for (; column + kAtOnce * kColumns <= D; column += kAtOnce * kColumns) {
    add_weighted_columns<T, kAtOnce>(rows, keys, weights, column, sums);
  }
  for (; column < D; column += kColumns) {
    add_weighted_columns<T, 1>(rows, keys, weights, column, sums);
  }
}

}  // namespace longhaul::cpu::LONGHAUL_ISA
