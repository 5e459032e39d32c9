// The building blocks of attention-like kernels: products of gathered rows with packed heads, and
// weighted sums of rows. Rows are in their natural layout and are read where they lie; only the few
// vectors of a query's heads are repacked.
//
// Heads lie on the lanes: a Floats holds 16 heads of one key. With 8 heads or fewer and bf16 a lane
// pair shares a head (kSplit): it holds two partial sums of one key first, then two keys of a head.
// Letters: H heads (padded to 8 if split, else to a multiple of 16), D elements of a row.
#pragma once

#include "longhaul/ops/cpu/simd.h"

namespace longhaul::cpu::LONGHAUL_ISA {

// Columns come in chunks of 32: rows are padded to a multiple of it by the caller.
constexpr int kColumns = 32;

// [D / step][vectors][16 words] of heads[h * stride + d]; heads from `num_heads` on are zero.
// A step is a word of 16 heads, or two words of 8 heads when split.
template <typename T, bool kSplit>
LONGHAUL_INLINE void pack_heads(const T* heads, int64_t stride, int num_heads, int64_t D,
                                int vectors, int32_t* out, int64_t out_stride) {
  constexpr int kHeads = kSplit ? 8 : 16, kWords = kSplit ? 2 : 1;
  constexpr int kStep = kWords * kPack<T>;
  for (int v = 0; v < vectors; ++v) {
    for (int h = 0; h < kHeads; ++h) {
      const int head = v * kHeads + h;
      int32_t* to = out + v * kLanes + h * kWords;
      if (head >= num_heads) {
        for (int64_t d = 0; d < D; d += kStep, to += out_stride) std::memset(to, 0, 4 * kWords);
      } else {
        const T* from = heads + head * stride;
        for (int64_t d = 0; d < D; d += kStep, to += out_stride) {
          std::memcpy(to, from + d, 4 * kWords);
        }
      }
    }
  }
}

// acc[r][c] += sum over `steps` of packed[step * stride + c] . rows[r][step], a step's words of the
// row broadcast to the lanes. kSets accumulators take turns, to hide the latency of short tiles.
template <typename T, bool kSplit, int R, int C, int kSets = 1>
LONGHAUL_INLINE void multiply_rows(const char* const* rows, const int32_t* packed, int64_t stride,
                                   int64_t steps, Floats (&acc)[R][C]) {
  constexpr int kBytes = kSplit ? 8 : 4;
  Floats sums[kSets][R][C];
  const char* row[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    row[r] = rows[r];
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) {
#pragma GCC unroll 4
      for (int set = 0; set < kSets; ++set) sums[set][r][c] = set == 0 ? acc[r][c] : Floats{};
    }
  }
  for (int64_t i = 0; i < steps; i += kSets) {
#pragma GCC unroll 4
    for (int set = 0; set < kSets; ++set) {
      Words columns[C];
#pragma GCC unroll 16
      for (int c = 0; c < C; ++c) columns[c] = load_words(packed + (i + set) * stride + c * kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const char* at = row[r] + (i + set) * kBytes;
        const Words x = kSplit ? broadcast_pair(at) : broadcast_word(at);
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c) sums[set][r][c] = dot<T>(sums[set][r][c], columns[c], x);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) {
      acc[r][c] = sums[0][r][c];
#pragma GCC unroll 4
      for (int set = 1; set < kSets; ++set) acc[r][c] += sums[set][r][c];
    }
  }
}

// Split accumulators of two keys (lane 2h + half) to one vector (lane 2h + key).
LONGHAUL_INLINE Floats merge_split(Floats first, Floats second) {
  const Words even = {0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30};
  const Words odd = {1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31};
  return __builtin_shuffle(first, second, even) + __builtin_shuffle(first, second, odd);
}

// Sums over heads: lane i of the result is key i's. 16 units of one key, or 8 units of two keys
// (the lanes of merge_split).
template <bool kSplit>
LONGHAUL_INLINE Floats sums_over_heads(const Floats* units) {
  if constexpr (kSplit) {
    using Pairs = double __attribute__((vector_size(64)));
    using Places = int64_t __attribute__((vector_size(64)));
    Floats x[4], y[2];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const Pairs a = Pairs(units[i]), b = Pairs(units[i + 4]);
      x[i] = Floats(__builtin_shuffle(a, b, Places{0, 1, 2, 3, 8, 9, 10, 11})) +
             Floats(__builtin_shuffle(a, b, Places{4, 5, 6, 7, 12, 13, 14, 15}));
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const Pairs a = Pairs(x[i]), b = Pairs(x[i + 2]);
      y[i] = Floats(__builtin_shuffle(a, b, Places{0, 1, 4, 5, 8, 9, 12, 13})) +
             Floats(__builtin_shuffle(a, b, Places{2, 3, 6, 7, 10, 11, 14, 15}));
    }
    const Pairs a = Pairs(y[0]), b = Pairs(y[1]);
    const Floats z = Floats(__builtin_shuffle(a, b, Places{0, 8, 2, 10, 4, 12, 6, 14})) +
                     Floats(__builtin_shuffle(a, b, Places{1, 9, 3, 11, 5, 13, 7, 15}));
    return Floats(__builtin_shuffle(Pairs(z), Places{0, 1, 4, 5, 2, 3, 6, 7}));
  } else {
    return sums_of_lanes(*reinterpret_cast<const Floats(*)[kLanes]>(units));
  }
}

// A chunk of 32 columns of kPack<T> rows as two vectors of words: for bf16 a word holds a column of
// both rows, in the order of x86's unpack instructions; for fp32 the columns of the one row.
template <typename T>
LONGHAUL_INLINE void load_columns(const char* const* rows, int64_t column, Words (&out)[2]) {
  const int64_t at = column * static_cast<int64_t>(sizeof(T));
  if constexpr (sizeof(T) == 4) {
    out[0] = load_words(rows[0] + at);
    out[1] = load_words(rows[0] + at + 64);
  } else {
    const Words x = load_words(rows[0] + at), y = load_words(rows[1] + at);
#if defined(__AVX512F__)
    out[0] = Words(_mm512_unpacklo_epi16(__m512i(x), __m512i(y)));
    out[1] = Words(_mm512_unpackhi_epi16(__m512i(x), __m512i(y)));
#else
    using Shorts = int16_t __attribute__((vector_size(64)));
    const Shorts lo = {0,  32, 1,  33, 2,  34, 3,  35, 8,  40, 9,  41, 10, 42, 11, 43,
                       16, 48, 17, 49, 18, 50, 19, 51, 24, 56, 25, 57, 26, 58, 27, 59};
    out[0] = Words(__builtin_shuffle(Shorts(x), Shorts(y), lo));
    out[1] = Words(__builtin_shuffle(Shorts(x), Shorts(y), lo + int16_t{4}));
#endif
  }
}

// Undoes the order of load_columns: columns 0 to 15 and 16 to 31.
template <typename T>
LONGHAUL_INLINE void natural_order(Floats (&x)[2]) {
  if constexpr (sizeof(T) == 2) {
    const Words first = {0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23};
    const Words low = __builtin_shuffle(Words(x[0]), Words(x[1]), first);
    x[1] = Floats(__builtin_shuffle(Words(x[0]), Words(x[1]), first + 8));
    x[0] = Floats(low);
  }
}

// sums [D / 32][H][2][16 lanes] += sum over keys of weights * row. weights: [keys / kPack<T>][H]
// words of kPack<T> keys each; H a multiple of 8, keys of kPack<T>.
template <typename T>
LONGHAUL_INLINE void add_weighted_rows(const char* const* rows, int keys, const int32_t* weights,
                                       int H, int64_t D, float* sums) {
  for (int64_t column = 0; column < D; column += kColumns) {
    for (int h0 = 0; h0 < H; h0 += 8) {
      float* to = sums + (column / kColumns * H + h0) * kColumns;
      Floats acc[8][2];
#pragma GCC unroll 8
      for (int h = 0; h < 8; ++h) {
        acc[h][0] = load(to + h * kColumns);
        acc[h][1] = load(to + h * kColumns + kLanes);
      }
      const int32_t* w = weights + h0;
      for (int key = 0; key < keys; key += kPack<T>, w += H) {
        Words x[2];
        load_columns<T>(rows + key, column, x);
#pragma GCC unroll 8
        for (int h = 0; h < 8; ++h) {
          const Words weight = broadcast_word(w + h);
          acc[h][0] = dot<T>(acc[h][0], x[0], weight);
          acc[h][1] = dot<T>(acc[h][1], x[1], weight);
        }
      }
#pragma GCC unroll 8
      for (int h = 0; h < 8; ++h) {
        store(to + h * kColumns, acc[h][0]);
        store(to + h * kColumns + kLanes, acc[h][1]);
      }
    }
  }
}

// Multiplies the sums of head h by factors[h].
LONGHAUL_INLINE void scale_sums(float* sums, int H, int64_t D, const float* factors) {
  for (int64_t chunk = 0; chunk < D / kColumns; ++chunk) {
    for (int h = 0; h < H; ++h, sums += kColumns) {
      const Floats f = all(factors[h]);
      store(sums, load(sums) * f);
      store(sums + kLanes, load(sums + kLanes) * f);
    }
  }
}

// out[h * stride + d] = sums * factors[h] for the heads and columns that are not padding.
template <typename T>
LONGHAUL_INLINE void store_sums(const float* sums, int H, int num_heads, int64_t D,
                                const float* factors, T* out, int64_t stride) {
  for (int64_t column = 0; column < D; column += kColumns) {
    for (int h = 0; h < num_heads; ++h) {
      const float* from = sums + (column / kColumns * H + h) * kColumns;
      Floats x[2] = {load(from) * factors[h], load(from + kLanes) * factors[h]};
      natural_order<T>(x);
      T* to = out + h * stride + column;
      store_rounded(to, x[0]);
      store_rounded(to + kLanes, x[1]);
    }
  }
}

// [H / kPack<Operand>][D] words for add_heads_to_row: element d of kPack<Operand> heads together.
// Heads from num_heads to H are zero.
template <typename Operand, typename T>
LONGHAUL_INLINE void pair_heads(const T* heads, int64_t stride, int num_heads, int H, int64_t D,
                                int32_t* out) {
  for (int h = 0; h < H; h += kPack<Operand>) {
    for (int64_t d = 0; d < D; d += kLanes, out += kLanes) {
      Floats x[2] = {};
      for (int i = 0; i < kPack<Operand>; ++i) {
        if (h + i < num_heads) x[i] = load_as_floats(heads + (h + i) * stride + d);
      }
      store_words(out, sizeof(Operand) == 2 ? pack_bf16(x[0], x[1]) : Words(x[0]));
    }
  }
}

// A part of a row's gradient: words of weights, each times the paired heads of that number.
struct RowTerm {
  const int32_t* paired;  // [words][D]
  int64_t D;
  int offset;  // of the term's first word in a row's weights
  int words;
};

// rows[r][16 C lanes from column] += sum over the terms' words of weights[r][word] . paired[word].
template <typename T, int R, int C>
LONGHAUL_INLINE void add_heads_to_rows(float* const* rows, const int32_t* const* weights,
                                       const RowTerm* terms, int num_terms, int64_t column) {
  Floats acc[R][C];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) acc[r][c] = load(rows[r] + column + c * kLanes);
  }
  for (int term = 0; term < num_terms; ++term) {
    const int32_t* paired = terms[term].paired + column;
    for (int i = 0; i < terms[term].words; ++i, paired += terms[term].D) {
      Words x[C];
#pragma GCC unroll 16
      for (int c = 0; c < C; ++c) x[c] = load_words(paired + c * kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const Words w = broadcast_word(weights[r] + terms[term].offset + i);
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c) acc[r][c] = dot<T>(acc[r][c], x[c], w);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) store(rows[r] + column + c * kLanes, acc[r][c]);
  }
}

// The same for `count` rows and all D columns of them, four rows at a time: locate(j, row, weights)
// points at those of row j. Terms are ordered from wide to narrow. For rows that are not there:
// no_row [4][D] takes what is added, no_weights is a row of zeros.
template <typename T, typename F>
LONGHAUL_INLINE void add_terms(const RowTerm* terms, int num_terms, int64_t D, int64_t count,
                               float* no_row, const int32_t* no_weights, const F& locate) {
  constexpr int kRowsAtOnce = 4;
  for (int64_t column = 0; column < D;) {
    int active = num_terms;
    while (terms[active - 1].D <= column) --active;
    const bool wide = terms[active - 1].D - column >= 64;
    for (int64_t j = 0; j < count; j += kRowsAtOnce) {
      float* rows[kRowsAtOnce];
      const int32_t* weights[kRowsAtOnce];
      for (int r = 0; r < kRowsAtOnce; ++r) {
        rows[r] = no_row + r * D, weights[r] = no_weights;
        if (j + r < count) locate(j + r, rows[r], weights[r]);
      }
      if (wide) {
        add_heads_to_rows<T, kRowsAtOnce, 4>(rows, weights, terms, active, column);
      } else {
        add_heads_to_rows<T, kRowsAtOnce, 2>(rows, weights, terms, active, column);
      }
    }
    column += wide ? 64 : 32;
  }
}

}  // namespace longhaul::cpu::LONGHAUL_ISA
