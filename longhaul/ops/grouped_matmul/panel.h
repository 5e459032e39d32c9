// What the kernels of this folder share: panels of 32 columns as operands of multiply_rows, and the
// products of rows with a panel. Widths need not divide: panels are filled up with zeros. Nothing
// outside this folder includes it.
#pragma once

#include "longhaul/ops/cpu/operands.h"
#include "longhaul/ops/cpu/rows.h"
#include "longhaul/ops/cpu/tile.h"
#include "longhaul/ops/cpu/workspace.h"

namespace longhaul::cpu::LONGHAUL_ISA {

constexpr int kPanel = 32;  // columns
constexpr int kVectors = kPanel / kLanes;
constexpr int kRows = kParts == 1 ? 8 : 16;  // that are multiplied at a time

// Sixteen words of operands: the first `count` elements, zeros behind; none where count is not
// positive.
template <typename T>
LONGHAUL_INLINE Words load_operands(const T* from, int64_t count) {
  constexpr int64_t kElements = kLanes * kPackOperand<T>;
  if (count >= kElements) return load_operands<Operand<T>>(from);
  T part[kElements] = {};
  if (count > 0) std::memcpy(part, from, static_cast<size_t>(count) * sizeof(T));
  return load_operands<Operand<T>>(part);
}

// Words of operands that n elements take.
template <typename T>
int64_t words_of(int64_t n) {
  return (n + kPackOperand<T> - 1) / kPackOperand<T>;
}

// A panel of up to 32 rows of `rows` [count, D] as columns: [words_of(D), rounded up to 16][32].
template <typename T>
LONGHAUL_INLINE void pack_rows(const T* rows, int64_t stride, int64_t count, int64_t D,
                               int32_t* out) {
  constexpr int64_t kElements = kLanes * kPackOperand<T>;
  for (int v = 0; v < kVectors; ++v) {
    for (int64_t d = 0; d < D; d += kElements) {
      Words x[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        const int64_t row = v * kLanes + i;
        x[i] = row < count ? load_operands(rows + row * stride + d, D - d) : Words{};
      }
      transpose_words(x);
      int32_t* to = out + d / kPackOperand<T> * kPanel + v * kLanes;
      for (int i = 0; i < kLanes; ++i) store_words(to + i * kPanel, x[i]);
    }
  }
}

// The first `columns` of 16 elements of a row, zeros behind.
template <typename T>
LONGHAUL_INLINE Floats load_part(const T* row, int64_t columns) {
  T part[kLanes] = {};  // not by memcpy: GCC warns of running over it
  for (int c = 0; c < kLanes && c < columns; ++c) part[c] = row[c];
  return load_as_floats(part);
}

// kPackOperand<T> elements of a column as a word, from up to 16 columns of as many rows; rows from
// `count` on and columns from `columns` on are zero.
template <typename T>
LONGHAUL_INLINE Words pair_rows(const T* rows, int64_t stride, int64_t count, int64_t columns) {
  Floats x[2] = {};
  if (columns >= kLanes) {
    for (int i = 0; i < kPackOperand<T>; ++i) {
      if (i < count) x[i] = load_as_floats(rows + i * stride);
    }
  } else {
    for (int i = 0; i < kPackOperand<T>; ++i) {
      if (i < count) x[i] = load_part(rows + i * stride, columns);
    }
  }
  return sizeof(Operand<T>) == 2 ? pack_bf16(x[0], x[1]) : Words(x[0]);
}

// A panel of up to 32 columns of `rows` [count, ...]: [words][32], words >= words_of(count).
template <typename T>
LONGHAUL_INLINE void pack_columns(const T* rows, int64_t stride, int64_t count, int64_t columns,
                                  int64_t words, int32_t* out) {
  for (int64_t word = 0; word < words; ++word) {
    const int64_t row = word * kPackOperand<T>;
    for (int v = 0; v < kVectors; ++v, out += kLanes) {
      store_words(out, pair_rows(rows + row * stride + v * kLanes, stride, count - row,
                                 columns - v * kLanes));
    }
  }
}

// Up to 32 columns, rounded.
template <typename T>
LONGHAUL_INLINE void store_columns(T* to, const Floats (&x)[kVectors], int64_t columns) {
#pragma GCC unroll 2
  for (int v = 0; v < kVectors; ++v) {
    const int64_t left = columns - v * kLanes;
    if (left >= kLanes) {
      put(to + v * kLanes, x[v], Whole{});
    } else if (left > 0) {
      put(to + v * kLanes, x[v], Part{left});
    }
  }
}

// acc[r] += the panel's columns times row r; rows from `count` on are those before them again. Rows
// are of operands.
template <typename T>
LONGHAUL_INLINE void multiply_panel(const char* rows, int64_t stride_bytes, int64_t count,
                                    const int32_t* panel, int64_t words,
                                    Floats (&acc)[kRows][kVectors]) {
  const char* row[kRows];
  for (int r = 0; r < kRows; ++r) row[r] = rows + (r < count ? r : count - 1) * stride_bytes;
  multiply_rows<Operand<T>, false, kRows, kVectors, 1, true>(row, panel, kPanel, words, acc);
}

}  // namespace longhaul::cpu::LONGHAUL_ISA
