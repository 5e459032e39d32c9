// How the heads of a query lie on the lanes (see tile.h). A unit is what one vector holds after the
// products: one key of 16 heads, or two keys of 8 heads.
#pragma once

#include "include/longhaul/kernels.h"
#include "longhaul/ops/cpu/dtype.h"
#include "longhaul/ops/cpu/tile.h"

namespace longhaul::cpu::LONGHAUL_ISA {

constexpr int kMaxVectors = 8;  // 128 heads

// Factors that change nothing.
struct Ones {
  float values[kMaxVectors * kLanes];
  constexpr Ones() : values() {
    for (float& x : values) x = 1;
  }
  constexpr operator const float*() const { return values; }
};

template <typename T, bool kSplit>
struct HeadLayout {
  static constexpr int kHeads = kSplit ? 8 : 16;  // of a vector
  static constexpr int kKeysInUnit = kSplit ? 2 : 1;
  static constexpr int kStep = (kSplit ? 2 : 1) * kPack<T>;  // elements of a row
  // Units whose values make up whole words of add_weighted_rows.
  static constexpr int kUnitsAtOnce = kPack<T> > kKeysInUnit ? kPack<T> / kKeysInUnit : 1;

  static constexpr int64_t vectors(int64_t H) { return (H + kHeads - 1) / kHeads; }
  static constexpr int64_t heads(int64_t H) { return vectors(H) * kHeads; }

  // Accumulators of a unit's keys to its vector.
  static LONGHAUL_INLINE Floats unit(const Floats* dots) {
    if constexpr (kSplit) {
      return merge_split(dots[0], dots[1]);
    } else {
      return dots[0];
    }
  }

  // The lanes whose key is among the first `count` of the unit.
  static LONGHAUL_INLINE Mask keys_before(int64_t count) {
    if (count <= 0) return 0;
    return kSplit && count == 1 ? 0x5555U : 0xffffU;
  }

  static LONGHAUL_INLINE Floats max_of_head(Floats x) { return kSplit ? max(x, swap_pairs(x)) : x; }
  static LONGHAUL_INLINE Floats sum_of_head(Floats x) { return kSplit ? x + swap_pairs(x) : x; }

  // One value of each head to and from memory.
  static LONGHAUL_INLINE void store_heads(float* out, Floats x) {
    float lanes[kLanes];
    store(lanes, x);
    for (int h = 0; h < kHeads; ++h) out[h] = lanes[kSplit ? 2 * h : h];
  }
  static LONGHAUL_INLINE Floats load_heads(const float* heads) {
    float lanes[kLanes];
    for (int i = 0; i < kLanes; ++i) lanes[i] = heads[kSplit ? i / 2 : i];
    return load(lanes);
  }

  // Log-sum-exp in base 2 of a query's heads, from the statistics of its softmax. Huge for padded
  // heads, so that their probabilities are 0.
  static LONGHAUL_INLINE void load_lse(const float* softmax_max, const float* softmax_sum,
                                       int64_t H, Floats (&lse)[kMaxVectors]) {
    float sums[kMaxVectors * kLanes], maxima[kMaxVectors * kLanes];
    for (int64_t h = 0; h < heads(H); ++h) {
      sums[h] = h < H ? softmax_sum[h] : 1;
      maxima[h] = h < H ? softmax_max[h] : 1e30F;
    }
    for (int64_t v = 0; v < vectors(H); ++v) {
      lse[v] = load_heads(maxima + v * kHeads) * kLog2E + log2(load_heads(sums + v * kHeads));
    }
  }

  // The two values of each head of vector v as a key's weights in a RowScatter: all heads' first
  // values, then all heads' second ones; for a unit of two keys, both keys' weights.
  static LONGHAUL_INLINE void store_key_weights(int32_t* out, int64_t v, int heads, Floats first,
                                                Floats second) {
    T* row = reinterpret_cast<T*>(out);
    if constexpr (kSplit) {
      store_rounded(row, even_lanes(first, second));
      store_rounded(row + kLanes, odd_lanes(first, second));
    } else {
      store_rounded(row + v * kLanes, first);
      store_rounded(row + heads + v * kLanes, second);
    }
  }
  // The same with one value.
  static LONGHAUL_INLINE void store_key_weights(int32_t* out, int64_t v, Floats values) {
    T* row = reinterpret_cast<T*>(out);
    if constexpr (kSplit) {
      store_rounded(row, evens_first(values));
    } else {
      store_rounded(row + v * kLanes, values);
    }
  }

  // kUnitsAtOnce units as words of add_weighted_rows, one or, key after key, two of each head.
  static LONGHAUL_INLINE void store_operand(int32_t* out, const Floats* units) {
    if constexpr (sizeof(T) == 4) {
      store(out, kSplit ? evens_first(units[0]) : units[0]);
    } else if constexpr (kSplit) {
      store_rounded(reinterpret_cast<bf16*>(out), units[0]);
    } else {
      store_words(out, pack_bf16(units[0], units[1]));
    }
  }
};

// Calls f<T, kSplit>() for the layout of H heads of the dtype.
template <typename F>
auto with_layout(longhaul_dtype dtype, int64_t H, const F& f) {
  return with_dtype(dtype, [&]<typename T>() {
    return H <= 8 ? f.template operator()<T, true>() : f.template operator()<T, false>();
  });
}

}  // namespace longhaul::cpu::LONGHAUL_ISA
