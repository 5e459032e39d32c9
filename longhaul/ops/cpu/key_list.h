// The keys that one query has selected, without gaps, and where they stood in its row of indices.
#pragma once

#include "longhaul/ops/cpu/simd.h"

namespace longhaul::cpu::LONGHAUL_ISA {

constexpr int kKeyBlock = 32;

struct KeyList {
  int32_t* keys;   // ascending, distinct; room for K rounded up to a block, and 16 more
  int32_t* slots;  // where each stood
  int64_t size = 0;
  bool in_place = false;  // key i stood in slot i

  void fill(const int32_t* indices, int64_t K) {
    size = 0;
    for (int64_t i = 0; i < K; i += kLanes) {
      const Mask there = first_lanes(K - i);
      const Words found = there == 0xffff ? load_words(indices + i) : load_tail(indices + i, K - i);
      const Mask valid = at_most(Words{}, found) & there;
      compress(valid, found, keys + size);
      compress(valid, lane_numbers() + static_cast<int32_t>(i), slots + size);
      size += __builtin_popcount(valid);
    }
    in_place = size == 0 || slots[size - 1] == size - 1;
    if (ascending()) return;
    in_place = false;
    sort();
  }

  // Of a row of K values those of keys i to i + 15; 0 from `size` on.
  LONGHAUL_INLINE Floats values(const float* row, int64_t i) const {
    if (in_place && i + kLanes <= size) return load(row + i);
    float lanes[kLanes] = {};
    for (int64_t j = i; j < i + kLanes && j < size; ++j) lanes[j - i] = row[slots[j]];
    return load(lanes);
  }
  // And back; what is behind `size` goes nowhere.
  LONGHAUL_INLINE void store_values(Floats values, float* row, int64_t i) const {
    if (in_place && i + kLanes <= size) return store(row + i, values);
    float lanes[kLanes];
    store(lanes, values);
    for (int64_t j = i; j < i + kLanes && j < size; ++j) row[slots[j]] = lanes[j - i];
  }

  // Zeros before store_values() is called for all keys; none where it writes every value anew.
  void clear_values(float* row, int64_t K) const {
    for (int64_t i = in_place ? size : 0; i < K; ++i) row[i] = 0;
  }

  // Pointers to the rows of a block of keys; a row of zeros where there are none.
  template <int N>
  int rows(int64_t from, const char* base, int64_t row_bytes, const char* zeros,
           const char* (&out)[N]) const {
    const int64_t count = size - from < N ? size - from : N;
    for (int64_t i = 0; i < count; ++i) out[i] = base + keys[from + i] * row_bytes;
    for (int64_t i = count; i < N; ++i) out[i] = zeros;
    return static_cast<int>(count);
  }

  // Asks for the rows of keys [from, to).
  LONGHAUL_INLINE void prefetch_rows(int64_t from, int64_t to, const char* base,
                                     int64_t row_bytes) const {
    const int64_t end = to < size ? to : size;
    for (int64_t i = from; i < end; ++i) prefetch(base + keys[i] * row_bytes, row_bytes);
  }

 private:
  // Whether the keys found are in order, as a selection leaves them.
  bool ascending() const {
    Mask wrong = 0;
    for (int64_t i = 0; i + 1 < size; i += kLanes) {
      wrong |= at_most(load_words(keys + i + 1), load_words(keys + i)) & first_lanes(size - 1 - i);
    }
    return wrong == 0;
  }

  // Shell's sort.
  void sort() {
    for (int64_t gap = size / 2; gap > 0; gap /= 2) {
      for (int64_t i = gap; i < size; ++i) {
        const int32_t key = keys[i], slot = slots[i];
        int64_t at = i;
        for (; at >= gap && keys[at - gap] > key; at -= gap) {
          keys[at] = keys[at - gap];
          slots[at] = slots[at - gap];
        }
        keys[at] = key;
        slots[at] = slot;
      }
    }
  }

  static Words load_tail(const int32_t* from, int64_t count) {
    Words words = all_words(-1);
    std::memcpy(&words, from, static_cast<size_t>(count) * 4);
    return words;
  }
};

}  // namespace longhaul::cpu::LONGHAUL_ISA
