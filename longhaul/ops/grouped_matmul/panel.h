// What the kernels of this folder share: panels of 32 columns as operands of multiply_rows, and the
// products of rows with a panel. Nothing outside this folder includes it.
#pragma once

#include "longhaul/ops/cpu/tile.h"
#include "longhaul/ops/cpu/workspace.h"

namespace longhaul::cpu::LONGHAUL_ISA {

constexpr int kPanel = 32;  // columns
constexpr int kVectors = kPanel / kLanes;
constexpr int kRows = 8;  // of a tile in registers

// What products of T are computed with: where an instruction set has none of bf16 pairs, rows and
// panels are widened once instead of at every step of every product.
#if defined(__AVX512BF16__)
template <typename T>
using Operand = T;
#else
template <typename T>
using Operand = float;
#endif
template <typename T>
constexpr int kPackOperand = kPack<Operand<T>>;

// Sixteen words of operands from as many elements as they hold.
template <typename T>
LONGHAUL_INLINE Words load_operands(const T* from) {
  if constexpr (sizeof(T) == sizeof(Operand<T>)) {
    return load_words(from);
  } else {
    return Words(load_as_floats(from));
  }
}

// Word j of row i becomes word i of row j.
LONGHAUL_INLINE void transpose_words(Words (&x)[kLanes]) {
#pragma GCC unroll 4
  for (int step = 1; step < kLanes; step *= 2) {
    const Words lane = lane_numbers();
    const Words upper = (lane & step) != 0;
    const Words first = (upper & (lane - step + kLanes)) | (~upper & lane);
    const Words second = (upper & (lane + kLanes)) | (~upper & (lane + step));
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      if (i & step) continue;
      const Words a = x[i], b = x[i + step];
      x[i] = __builtin_shuffle(a, b, first);
      x[i + step] = __builtin_shuffle(a, b, second);
    }
  }
}

// A panel of 32 rows of `rows` [32, D] as columns: [D / kPackOperand<T>][32] words. D a multiple of
// 32.
template <typename T>
LONGHAUL_INLINE void pack_rows(const T* rows, int64_t stride, int64_t D, int32_t* out) {
  constexpr int64_t kElements = kLanes * kPackOperand<T>;
  for (int v = 0; v < kVectors; ++v) {
    for (int64_t d = 0; d < D; d += kElements) {
      Words x[kLanes];
      for (int i = 0; i < kLanes; ++i) x[i] = load_operands(rows + (v * kLanes + i) * stride + d);
      transpose_words(x);
      int32_t* to = out + d / kPackOperand<T> * kPanel + v * kLanes;
      for (int i = 0; i < kLanes; ++i) store_words(to + i * kPanel, x[i]);
    }
  }
}

// kPackOperand<T> elements of a column as a word, from 16 columns of as many rows; rows from
// `count` on are zero.
template <typename T>
LONGHAUL_INLINE Words pair_rows(const T* rows, int64_t stride, int64_t count) {
  Floats x[2] = {};
  for (int i = 0; i < kPackOperand<T>; ++i) {
    if (i < count) x[i] = load_as_floats(rows + i * stride);
  }
  return sizeof(Operand<T>) == 2 ? pack_bf16(x[0], x[1]) : Words(x[0]);
}

// acc[r] += the panel's columns times row r; rows from `count` on are those before them again. Rows
// are of operands.
template <typename T>
LONGHAUL_INLINE void multiply_panel(const char* rows, int64_t stride_bytes, int64_t count,
                                    const int32_t* panel, int64_t words,
                                    Floats (&acc)[kRows][kVectors]) {
  const char* row[kRows];
  for (int r = 0; r < kRows; ++r) row[r] = rows + (r < count ? r : count - 1) * stride_bytes;
  multiply_rows<Operand<T>, false, kRows, kVectors>(row, panel, kPanel, words, acc);
}

}  // namespace longhaul::cpu::LONGHAUL_ISA
