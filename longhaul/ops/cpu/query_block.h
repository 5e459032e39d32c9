// The blocking of dense attention: queries of one head lie on the lanes, so that maxima, sums and
// probabilities are vertical and nothing is wasted whatever the number of heads. A group is the 32
// queries of two vectors; a block is up to four groups, which share a tile of keys while it is in
// the cache. Keys that a group does not see are skipped.
#pragma once

#include "longhaul/ops/cpu/dtype.h"
#include "longhaul/ops/cpu/heads.h"
#include "longhaul/ops/cpu/workspace.h"

namespace longhaul::cpu::LONGHAUL_ISA {

constexpr int kVectors = 2;                   // of a group
constexpr int kGroup = kVectors * kLanes;     // queries
constexpr int kGroups = 4;                    // of a block
constexpr int64_t kBlock = kGroups * kGroup;  // queries
constexpr int kTile = 64;                     // keys
constexpr int kRows = 8;                      // keys that are multiplied at a time
constexpr float kMasked = -1e30F;             // finite: a row without keys gives no NaN

// The queries of a sequence of S, filled up to whole groups, as far as one block goes.
inline int64_t block_lanes(int64_t S) { return S >= kBlock ? kBlock : round_up(S, kGroup); }

struct KeyRange {
  int64_t low = INT64_MAX, high = 0;  // [low, high)

  bool meets(int64_t from, int64_t to) const { return low < to && from < high; }
};

// What the queries of a group see. Lanes without a query see everything, to no effect: their
// operands are zero.
struct GroupView {
  Words first[kVectors], last[kVectors];
  KeyRange any;    // the keys that a query sees
  KeyRange every;  // those that all see

  GroupView() = default;
  // Queries [0, count) see keys first_key[i] to last_key[i].
  GroupView(const int64_t* first_key, const int64_t* last_key, int64_t count) {
    int32_t firsts[kGroup], lasts[kGroup];
    every = {0, INT64_MAX};
    for (int i = 0; i < kGroup; ++i) {
      firsts[i] = INT32_MIN, lasts[i] = INT32_MAX;
      if (i >= count) continue;
      const bool none = first_key[i] > last_key[i];
      firsts[i] = none ? INT32_MAX : static_cast<int32_t>(first_key[i]);
      lasts[i] = none ? -1 : static_cast<int32_t>(last_key[i]);
      every.low = firsts[i] > every.low ? firsts[i] : every.low;
      every.high = lasts[i] + int64_t{1} < every.high ? lasts[i] + int64_t{1} : every.high;
      if (none) continue;
      any.low = firsts[i] < any.low ? firsts[i] : any.low;
      any.high = lasts[i] + int64_t{1} > any.high ? lasts[i] + int64_t{1} : any.high;
    }
    for (int v = 0; v < kVectors; ++v) {
      first[v] = load_words(firsts + v * kLanes);
      last[v] = load_words(lasts + v * kLanes);
    }
  }

  bool all_see(int64_t from, int64_t to) const { return every.low <= from && to <= every.high; }
  Mask sees(int v, int64_t key) const {
    const Words number = all_words(static_cast<int32_t>(key));
    return at_most(first[v], number) & at_most(number, last[v]);
  }
};

// A block's groups and the keys that any of them sees.
struct BlockView {
  GroupView groups[kGroups];
  KeyRange keys;
  int64_t queries = 0;

  BlockView() = default;
  BlockView(const int64_t* first_key, const int64_t* last_key, int64_t count) : queries(count) {
    for (int g = 0; g < kGroups; ++g) {
      if (g * kGroup >= count) continue;
      groups[g] = GroupView(first_key + g * kGroup, last_key + g * kGroup, count - g * kGroup);
      keys.low = groups[g].any.low < keys.low ? groups[g].any.low : keys.low;
      keys.high = groups[g].any.high > keys.high ? groups[g].any.high : keys.high;
    }
  }
  int64_t queries_of(int g) const {
    const int64_t left = queries - g * kGroup;
    return left < 0 ? 0 : left < kGroup ? left : kGroup;
  }
};

// Pointers to the rows of keys [from, from + kTile); a row of zeros from `end` on. Returns the
// number of rows, filled up to whole register tiles.
struct TileRows {
  const char* of[kTile];
  int padded;

  TileRows(const void* rows, int64_t row_bytes, int64_t from, int64_t end, const char* zeros) {
    const int64_t count = end - from < kTile ? end - from : kTile;
    padded = static_cast<int>(round_up(count, kRows));
    for (int64_t i = 0; i < padded; ++i) {
      of[i] = i < count ? static_cast<const char*>(rows) + (from + i) * row_bytes : zeros;
    }
  }
};

// A group's queries of one head as operands: [D / kPack<T>][32] words.
template <typename Operand, typename T>
LONGHAUL_INLINE void pack_group(const T* queries, int64_t stride, int64_t count, int64_t D,
                                int32_t* out) {
  pack_heads<Operand, false>(queries, stride, static_cast<int>(count), D, kVectors, out, kGroup);
}

// Dot products of 8 rows with a packed group.
template <typename T>
LONGHAUL_INLINE void multiply_group(const char* const* rows, const int32_t* packed, int64_t D,
                                    Floats (&dots)[kRows][kVectors]) {
  multiply_rows<T, false, kRows, kVectors>(rows, packed, kGroup, D / kPack<T>, dots);
}

// Log-sum-exp in base 2 of a group's queries, from the statistics of a softmax. Huge, so that
// probabilities are 0, where there is no query or where it saw no key.
LONGHAUL_INLINE void load_lse(const float* maxima, const float* sums, int64_t stride, int64_t count,
                              Floats (&lse)[kVectors]) {
  float m[kGroup], s[kGroup];
  for (int i = 0; i < kGroup; ++i) {
    const bool there = i < count && !(sums[i * stride] <= 0);  // NaN reaches the results
    m[i] = there ? maxima[i * stride] * kLog2E : -kMasked;
    s[i] = there ? sums[i * stride] : 1;
  }
  for (int v = 0; v < kVectors; ++v) lse[v] = load(m + v * kLanes) + log2(load(s + v * kLanes));
}

}  // namespace longhaul::cpu::LONGHAUL_ISA
