// The building blocks of attention-like kernels: products of gathered rows with packed heads, and
// weighted sums of rows. Rows are in their natural layout and are read where they lie; only the few
// vectors of a query's heads are repacked.
//
// Heads lie on the lanes: a Floats holds 16 heads of one key. With 8 heads or fewer a lane
// pair shares a head (kSplit): it holds two partial sums of one key first, then two keys of a head.
// Letters: H heads (padded to 8 if split, else to a multiple of 16), D elements of a row.
#pragma once

#include "longhaul/ops/cpu/simd.h"

namespace longhaul::cpu::LONGHAUL_ISA {

// Columns come in chunks of 32: rows are padded to a multiple of it by the caller.
constexpr int kColumns = 32;

// N words of operands.
template <typename Operand, int N, typename T>
LONGHAUL_INLINE void copy_words(const T* from, int32_t* to) {
  if constexpr (sizeof(T) == sizeof(Operand)) {
    std::memcpy(to, from, 4 * N);
  } else {
#pragma GCC unroll 2
    for (int i = 0; i < N; ++i) to[i] = from[i].bits << 16;
  }
}

// Sixteen words of operands.
template <typename Operand, typename T>
LONGHAUL_INLINE Words load_operands(const T* from) {
  if constexpr (sizeof(T) == sizeof(Operand)) {
    return load_words(from);
  } else {
    return Words(load_as_floats(from));
  }
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// Word j of row i becomes word i of row j, of eight rows.
LONGHAUL_INLINE void transpose_eight(__m256i (&x)[8]) {
  __m256i pairs[8], fours[8];  // of rows, next to each other in each half
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_epi32(x[i], x[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_epi32(x[i], x[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const int from = i / 2 * 4 + i % 2;
    fours[2 * i] = _mm256_unpacklo_epi64(pairs[from], pairs[from + 2]);
    fours[2 * i + 1] = _mm256_unpackhi_epi64(pairs[from], pairs[from + 2]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    x[i] = _mm256_permute2x128_si256(fours[i], fours[i + 4], 0x20);
    x[i + 4] = _mm256_permute2x128_si256(fours[i], fours[i + 4], 0x31);
  }
}
#endif

// Word j of row i becomes word i of row j.
LONGHAUL_INLINE void transpose_words(Words (&x)[kLanes]) {
#if defined(__AVX512F__)
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
#elif defined(__AVX2__)
  Words columns[kLanes];
  for (int rows = 0; rows < kLanes; rows += 8) {
    for (int part = 0; part < kParts; ++part) {
      __m256i block[8];
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) block[i] = __m256i(x[rows + i].part[part]);
      transpose_eight(block);
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) columns[8 * part + i].part[rows / 8] = RegisterWords(block[i]);
    }
  }
  for (int i = 0; i < kLanes; ++i) x[i] = columns[i];
#else
  int32_t rows[kLanes][kLanes], columns[kLanes][kLanes];
  std::memcpy(rows, x, sizeof rows);
  for (int i = 0; i < kLanes; ++i) {
    for (int j = 0; j < kLanes; ++j) columns[j][i] = rows[i][j];
  }
  std::memcpy(static_cast<void*>(x), columns, sizeof columns);
#endif
}

// The same with pairs of words, of eight rows: a round of zips moves the highest bit of a row's
// number to the lowest bit of its pairs' numbers.
LONGHAUL_INLINE void transpose_pairs(Words (&x)[8]) {
#pragma GCC unroll 3
  for (int round = 0; round < 3; ++round) {
    Words y[8];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const Words a = x[i], b = x[i + 4];
      y[2 * i] = shuffle<0, 1, 16, 17, 2, 3, 18, 19, 4, 5, 20, 21, 6, 7, 22, 23>(a, b);
      y[2 * i + 1] = shuffle<8, 9, 24, 25, 10, 11, 26, 27, 12, 13, 28, 29, 14, 15, 30, 31>(a, b);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) x[i] = y[i];
  }
}

// [D / step][vectors][16 words] of heads[h * stride + d]; heads from `num_heads` on are zero.
// A step is a word of 16 heads, or two words of 8 heads when split.
template <typename Operand, bool kSplit, typename T>
LONGHAUL_INLINE void pack_heads(const T* heads, int64_t stride, int num_heads, int64_t D,
                                int vectors, int32_t* out, int64_t out_stride) {
  constexpr int kHeads = kSplit ? 8 : 16, kWords = kSplit ? 2 : 1;
  constexpr int kStep = kWords * kPack<Operand>;
  for (int v = 0; v < vectors; ++v) {
    const int here = num_heads - v * kHeads;
    const T* const from = heads + v * kHeads * stride;
    int32_t* const to_v = out + v * kLanes;
    if constexpr (kParts == 1) {
      for (int64_t d = 0; d < D; d += kHeads * kStep) {
        Words x[kHeads];
#pragma GCC unroll 16
        for (int h = 0; h < kHeads; ++h) {
          x[h] = h < here ? load_operands<Operand>(from + h * stride + d) : Words{};
        }
        if constexpr (kSplit) {
          transpose_pairs(x);
        } else {
          transpose_words(x);
        }
#pragma GCC unroll 16
        for (int i = 0; i < kHeads; ++i) store_words(to_v + (d / kStep + i) * out_stride, x[i]);
      }
    } else {
      for (int h = 0; h < kHeads; ++h) {
        int32_t* to = to_v + h * kWords;
        for (int64_t d = 0; d < D; d += kStep, to += out_stride) {
          if (h < here) {
            copy_words<Operand, kWords>(from + h * stride + d, to);
          } else {
            std::memset(to, 0, 4 * kWords);
          }
        }
      }
    }
  }
}

// A tile in registers: acc[r][c] += sum over `steps` of packed[step * stride + c] . rows[r][step],
// a step's words of the row broadcast to the lanes. kSets accumulators take turns, to hide the
// latency of short tiles.
template <typename T, bool kSplit, int kSets, int R, int C>
LONGHAUL_INLINE void multiply_tile(const char* const* rows, const int32_t* packed, int64_t stride,
                                   int64_t steps, Register (&acc)[R][C]) {
  constexpr int kBytes = kSplit ? 8 : 4;
  Register sums[kSets][R][C];
  const char* row[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    row[r] = rows[r];
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) {
#pragma GCC unroll 4
      for (int set = 0; set < kSets; ++set) sums[set][r][c] = set == 0 ? acc[r][c] : Register{};
    }
  }
  for (int64_t i = 0; i < steps; i += kSets) {
#pragma GCC unroll 4
    for (int set = 0; set < kSets; ++set) {
      RegisterWords columns[C];
#pragma GCC unroll 16
      for (int c = 0; c < C; ++c) {
        columns[c] = load_as<RegisterWords>(packed + (i + set) * stride + c * kRegisterLanes);
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const char* at = row[r] + (i + set) * kBytes;
        const auto x = kSplit ? broadcast_pair(at) : broadcast_word(at);
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

// What sixteen registers hold beside the operands.
constexpr int kTileRows = 4, kTileRegisters = 2;

// A tile's rows lie `stride` floats apart in memory, its registers kApart.
template <int kApart = kRegisterLanes, int R, int C>
LONGHAUL_INLINE void load_tile(Register (&tile)[R][C], const float* from, int64_t stride) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) tile[r][c] = load_as<Register>(from + r * stride + c * kApart);
  }
}
template <int kApart = kRegisterLanes, int R, int C>
LONGHAUL_INLINE void store_tile(const Register (&tile)[R][C], float* to, int64_t stride) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) store_as(to + r * stride + c * kApart, tile[r][c]);
  }
}

// multiply_tile() of sums in memory, or, without kAdd, in their place.
template <typename T, bool kSplit, bool kAdd, int R, int C, int kSets = 1>
LONGHAUL_TILE void store_product_tile(const char* const* rows, const int32_t* packed,
                                      int64_t stride, int64_t steps, float* acc,
                                      int64_t acc_stride) {
  Register tile[R][C] = {};
  if constexpr (kAdd) load_tile(tile, acc, acc_stride);
  multiply_tile<T, kSplit, kSets>(rows, packed, stride, steps, tile);
  store_tile(tile, acc, acc_stride);
}

// acc[r][c] = sum over `steps` of packed[step * stride + c] . rows[r][step], or with kAdd +=, as in
// multiply_tile(), in tiles that the registers hold: of AVX-512's 32 the whole, with kSets. So many
// steps at a time that the first cache keeps their columns for all rows.
template <typename T, bool kSplit, int R, int C, int kSets = 1, bool kAdd = false>
LONGHAUL_INLINE void multiply_rows(const char* const* rows, const int32_t* packed, int64_t stride,
                                   int64_t steps, Floats (&acc)[R][C]) {
  if constexpr (kParts == 1) {
    store_product_tile<T, kSplit, kAdd, R, C, kSets>(rows, packed, stride, steps,
                                                     reinterpret_cast<float*>(acc), C * kLanes);
  } else {
    constexpr int64_t kSteps = R > 8 ? 128 : 192;
    constexpr int kAtOnce = C * kParts % 3 == 0 ? 3 : kTileRegisters;
    static_assert(R % kTileRows == 0 && C * kParts % kAtOnce == 0);
    const char* from[R];
    for (int64_t step = 0; step == 0 || step < steps; step += kSteps) {
      const int64_t count = steps - step < kSteps ? steps - step : kSteps;
      for (int r = 0; r < R; ++r) from[r] = rows[r] + step * (kSplit ? 8 : 4);
      for (int r = 0; r < R; r += kTileRows) {
        for (int c = 0; c < C * kParts; c += kAtOnce) {
          const int32_t* columns = packed + step * stride + c * kRegisterLanes;
          float* to = reinterpret_cast<float*>(acc[r]) + c * kRegisterLanes;
          if (kAdd || step > 0) {
            store_product_tile<T, kSplit, true, kTileRows, kAtOnce>(from + r, columns, stride,
                                                                    count, to, C * kLanes);
          } else {
            store_product_tile<T, kSplit, false, kTileRows, kAtOnce>(from + r, columns, stride,
                                                                     count, to, C * kLanes);
          }
        }
      }
    }
  }
}

// Split accumulators of two keys (lane 2h + half) to one vector (lane 2h + key).
LONGHAUL_INLINE Floats merge_split(Floats first, Floats second) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  return Floats::of([&](int p) {
    // Of each four lanes first's two sums and second's.
    const __m256 sums = _mm256_hadd_ps(first.part[p], second.part[p]);
    return Register(_mm256_permute_ps(sums, 0xD8));
  });
#else
  return shuffle<0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30>(first, second) +
         shuffle<1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31>(first, second);
#endif
}

// Sums over heads: lane i of the result is key i's. 16 units of one key, or 8 units of two keys
// (the lanes of merge_split).
template <bool kSplit>
LONGHAUL_INLINE Floats sums_over_heads(const Floats* units) {
  if constexpr (kSplit) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    return Floats::of([&](int p) {
      __m256d sums[2];
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        const Floats &a = units[4 * p + 2 * i], &b = units[4 * p + 2 * i + 1];
        const auto x = __m256d(a.part[0] + a.part[1]), y = __m256d(b.part[0] + b.part[1]);
        sums[i] = __m256d(__m256(_mm256_unpacklo_pd(x, y)) + __m256(_mm256_unpackhi_pd(x, y)));
      }
      return Register(__m256(_mm256_permute2f128_pd(sums[0], sums[1], 0x20)) +
                      __m256(_mm256_permute2f128_pd(sums[0], sums[1], 0x31)));
    });
#else
    // Halves, then quarters, then pairs of lanes, of two vectors at a time.
    Floats x[4], y[2];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const Floats a = units[i], b = units[i + 4];
      x[i] = shuffle<0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23>(a, b) +
             shuffle<8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31>(a, b);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const Floats a = x[i], b = x[i + 2];
      y[i] = shuffle<0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27>(a, b) +
             shuffle<4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31>(a, b);
    }
    const Floats a = y[0], b = y[1];
    const Floats z = shuffle<0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29>(a, b) +
                     shuffle<2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31>(a, b);
    return shuffle<0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15>(z, z);
#endif
  } else {
    return sums_of_lanes(*reinterpret_cast<const Floats(*)[kLanes]>(units));
  }
}

// The 16-bit elements of x and y in turn: the lower halves of each 16 bytes, and the upper ones.
LONGHAUL_INLINE void interleave(RegisterWords x, RegisterWords y, RegisterWords (&out)[2]) {
#if defined(__AVX512F__)
  out[0] = RegisterWords(_mm512_unpacklo_epi16(__m512i(x), __m512i(y)));
  out[1] = RegisterWords(_mm512_unpackhi_epi16(__m512i(x), __m512i(y)));
#elif defined(__AVX2__)
  out[0] = RegisterWords(_mm256_unpacklo_epi16(__m256i(x), __m256i(y)));
  out[1] = RegisterWords(_mm256_unpackhi_epi16(__m256i(x), __m256i(y)));
#elif defined(__SSE2__)
  out[0] = RegisterWords(_mm_unpacklo_epi16(__m128i(x), __m128i(y)));
  out[1] = RegisterWords(_mm_unpackhi_epi16(__m128i(x), __m128i(y)));
#else
  using Shorts = int16_t __attribute__((vector_size(16)));
  const Shorts low = {0, 8, 1, 9, 2, 10, 3, 11};
  out[0] = RegisterWords(__builtin_shuffle(Shorts(x), Shorts(y), low));
  out[1] = RegisterWords(__builtin_shuffle(Shorts(x), Shorts(y), low + int16_t{4}));
#endif
}

// A chunk of 32 columns of kPack<T> rows as two vectors of words: for bf16 a word holds a column of
// both rows, in the order of interleave(); for fp32 the columns of the one row. Of each of the two
// the register that is number `part`.
template <typename T>
LONGHAUL_INLINE void load_columns(const char* const* rows, int64_t column, int part,
                                  RegisterWords (&out)[2]) {
  const int64_t at = column * static_cast<int64_t>(sizeof(T)) + part * 4 * kRegisterLanes;
  if constexpr (sizeof(T) == 4) {
    out[0] = load_as<RegisterWords>(rows[0] + at);
    out[1] = load_as<RegisterWords>(rows[0] + at + 4 * kLanes);
  } else {
    interleave(load_as<RegisterWords>(rows[0] + at), load_as<RegisterWords>(rows[1] + at), out);
  }
}

// Undoes the order of load_columns: columns 0 to 15 and 16 to 31.
template <typename T>
LONGHAUL_INLINE void natural_order(Floats (&x)[2]) {
  if constexpr (sizeof(T) == 2) {
    const Floats low = shuffle<0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23>(x[0], x[1]);
    x[1] = shuffle<8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31>(x[0], x[1]);
    x[0] = low;
  }
}

// Sums of kHeads heads at two registers of columns += sum over keys of weights * row.
template <typename T, int kHeads>
LONGHAUL_TILE void add_weighted_tile(const char* const* rows, int keys, const int32_t* weights,
                                     int H, int64_t column, int part, float* sums) {
  Register acc[kHeads][2];
  load_tile<kLanes>(acc, sums, kColumns);
  for (int key = 0; key < keys; key += kPack<T>, weights += H) {
    RegisterWords x[2];
    load_columns<T>(rows + key, column, part, x);
#pragma GCC unroll 8
    for (int h = 0; h < kHeads; ++h) {
      const auto weight = broadcast_word(weights + h);
      acc[h][0] = dot<T>(acc[h][0], x[0], weight);
      acc[h][1] = dot<T>(acc[h][1], x[1], weight);
    }
  }
  store_tile<kLanes>(acc, sums, kColumns);
}

// sums [D / 32][H][2][16 lanes] += sum over keys of weights * row. weights: [keys / kPack<T>][H]
// words of kPack<T> keys each; H a multiple of 8, keys of kPack<T>.
template <typename T>
LONGHAUL_INLINE void add_weighted_rows(const char* const* rows, int keys, const int32_t* weights,
                                       int H, int64_t D, float* sums) {
  constexpr int kHeads = kParts == 1 ? 8 : kTileRows;
  for (int64_t column = 0; column < D; column += kColumns) {
    for (int part = 0; part < kParts; ++part) {
      for (int h = 0; h < H; h += kHeads) {
        float* to = sums + (column / kColumns * H + h) * kColumns + part * kRegisterLanes;
        add_weighted_tile<T, kHeads>(rows, keys, weights + h, H, column, part, to);
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
template <typename Operand, typename T>
LONGHAUL_INLINE void store_sums(const float* sums, int H, int num_heads, int64_t D,
                                const float* factors, T* out, int64_t stride) {
  for (int64_t column = 0; column < D; column += kColumns) {
    for (int h = 0; h < num_heads; ++h) {
      const float* from = sums + (column / kColumns * H + h) * kColumns;
      Floats x[2] = {load(from) * factors[h], load(from + kLanes) * factors[h]};
      natural_order<Operand>(x);
      T* to = out + h * stride + column;
      store_rounded(to, x[0]);
      store_rounded(to + kLanes, x[1]);
    }
  }
}

// [H / kPack<Operand>][D] words for add_heads_to_rows: element d of kPack<Operand> heads together.
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

// rows[r] += sum over the terms' words of weights[r][word] . paired[word], at columns from `column`
// to `end`, C registers at a time; at least one term, of at least one word.
template <typename T, int R, int C>
LONGHAUL_TILE void add_heads_to_rows(float* const* rows, const int32_t* const* weights,
                                     const RowTerm* terms, int num_terms, int64_t column,
                                     int64_t end) {
  float* row[R];
  const int32_t* weight[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    row[r] = rows[r];
    weight[r] = weights[r];
  }
  const RowTerm* const last = terms + num_terms;
  do {
    Register acc[R][C];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
      for (int c = 0; c < C; ++c)
        acc[r][c] = load_as<Register>(row[r] + column + c * kRegisterLanes);
    }
    const RowTerm* term = terms;
    do {
      const int32_t* paired = term->paired + column;
      int64_t word = term->offset;
      const int64_t end_of_words = word + term->words;
      do {
        RegisterWords w[R];
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) w[r] = broadcast_word(weight[r] + word);
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c) {
          const auto x = load_as<RegisterWords>(paired + c * kRegisterLanes);
#pragma GCC unroll 16
          for (int r = 0; r < R; ++r) acc[r][c] = dot<T>(acc[r][c], x, w[r]);
        }
        paired += term->D;
      } while (++word < end_of_words);
    } while (++term < last);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
      for (int c = 0; c < C; ++c) store_as(row[r] + column + c * kRegisterLanes, acc[r][c]);
    }
    column += C * kRegisterLanes;
  } while (column < end);
}

// Rows of a tile: with four registers of each, their weights and an operand three fill sixteen
// registers.
constexpr int kRowsAtOnce = kParts == 1 ? 4 : 3;

// add_heads_to_rows() for R rows from `j` on and all columns of them; the parameters are those of
// add_terms().
template <typename T, int R, typename F>
LONGHAUL_INLINE void add_terms_to_rows(const RowTerm* terms, int num_terms, int64_t j,
                                       const F& locate) {
  constexpr int64_t kTileColumns = 4 * kRegisterLanes;
  float* rows[R];
  const int32_t* weights[R];
  for (int r = 0; r < R; ++r) locate(j + r, rows[r], weights[r]);
  int64_t column = 0;
  for (int active = num_terms; active > 0; --active) {
    const int64_t end = terms[active - 1].D, whole = end - (end - column) % kTileColumns;
    if (column < whole) add_heads_to_rows<T, R, 4>(rows, weights, terms, active, column, whole);
    if (whole < end) add_heads_to_rows<T, R, 2>(rows, weights, terms, active, whole, end);
    column = end;
  }
}

// Adds the terms to `count` rows, some at a time: locate(j, row, weights) points at those of row j.
// Terms are ordered from wide to narrow, the first has all columns.
template <typename T, typename F>
LONGHAUL_INLINE void add_terms(const RowTerm* terms, int num_terms, int64_t count,
                               const F& locate) {
  int64_t j = 0;
  for (; j + kRowsAtOnce <= count; j += kRowsAtOnce) {
    add_terms_to_rows<T, kRowsAtOnce>(terms, num_terms, j, locate);
  }
  const int64_t rest = count - j;
  if constexpr (kRowsAtOnce > 3) {
    if (rest == 3) add_terms_to_rows<T, 3>(terms, num_terms, j, locate);
  }
  if (rest == 2) add_terms_to_rows<T, 2>(terms, num_terms, j, locate);
  if (rest == 1) add_terms_to_rows<T, 1>(terms, num_terms, j, locate);
}

}  // namespace longhaul::cpu::LONGHAUL_ISA
