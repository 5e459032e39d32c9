// The K largest of a stream of scores that comes in ascending order of index; ties go to the lowest
// index. Scores at or below a running threshold are dropped while they stream by; when the buffer
// is full the threshold rises until little more than K are above it. Exact: a threshold only stands
// once K kept scores lie strictly above it.
#pragma once

#include "longhaul/ops/cpu/simd.h"

namespace longhaul::cpu::LONGHAUL_ISA {

// Order of floats as integers, so that a bisection ends after 32 steps.
LONGHAUL_INLINE int32_t to_order(float x) {
  int32_t i;
  std::memcpy(&i, &x, sizeof i);
  return i < 0 ? i ^ 0x7fffffff : i;
}
LONGHAUL_INLINE float from_order(int32_t i) {
  if (i < 0) i ^= 0x7fffffff;
  float x;
  std::memcpy(&x, &i, sizeof x);
  return x;
}

class TopK {
 public:
  // Room behind the capacity for what one add() appends, and behind that for a vector of which only
  // the first lanes count.
  static constexpr int64_t kSlack = 4 * kLanes;
  static int64_t capacity(int64_t K) { return (2 * K + 64 > K + 512 ? 2 * K + 64 : K + 512); }
  // Elements of each of the two buffers.
  static int64_t buffer_size(int64_t K) { return capacity(K) + kSlack; }

  TopK() = default;
  TopK(int64_t K, float* scores, int32_t* indices)
      : K_(K), capacity_(capacity(K)), scores_(scores), indices_(indices) {}

  // Takes the lanes of the masks; lane i of vector v has index `first` + 16 v + i. No branch on
  // what is above the threshold: it would be foreseen wrongly too often.
  template <int N>
  LONGHAUL_INLINE void add(const Mask (&valid)[N], const Floats (&scores)[N], int32_t first) {
    static_assert(N * kLanes + kLanes <= kSlack);
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) {
      append(valid[v] & greater(scores[v], all(threshold_)), scores[v],
             lane_numbers() + (first + v * kLanes));
    }
    if (size_ > capacity_) raise_threshold();
  }

  // Writes the chosen in ascending order of index; the tail up to K gets index -1 and score 0.
  void finish(int32_t* indices, float* scores) {
    if (size_ > K_) keep_exactly_k();
    std::memcpy(indices, indices_, static_cast<size_t>(size_) * sizeof *indices);
    std::memcpy(scores, scores_, static_cast<size_t>(size_) * sizeof *scores);
    for (int64_t i = size_; i < K_; ++i) {
      indices[i] = -1;
      scores[i] = 0;
    }
  }

 private:
  LONGHAUL_INLINE void append(Mask m, Floats scores, Words indices) {
    compress(m, scores, scores_ + size_);
    compress(m, indices, indices_ + size_);
    size_ += __builtin_popcount(m);
  }

  struct Range {
    float low, high;
  };

  // Of the scores, of which there is one at least.
  Range range() const {
    Floats low = all(scores_[0]), high = low;
    for (int64_t i = 0; i < size_; i += kLanes) {
      const Floats x = select(first_lanes(size_ - i), load(scores_ + i), all(scores_[0]));
      low = min(low, x);
      high = max(high, x);
    }
    return {-largest(-low), largest(high)};
  }

  int64_t count_above(float threshold) const {
    int64_t count = 0, i = 0;
    for (; i + kLanes <= size_; i += kLanes) {
      count += __builtin_popcount(greater(load(scores_ + i), all(threshold)));
    }
    const Mask above = greater(load(scores_ + i), all(threshold));
    return count + __builtin_popcount(above & first_lanes(size_ - i));
  }

  // A threshold above which lie at least K, and at most `most` if ties allow. Tries where the count
  // would be right if scores were spread evenly and the middle of the range in turn; then the
  // middle of the range of float numbers.
  float find_threshold(int64_t most) const {
    auto [low, high] = range();
    constexpr float kSmallest = 1.17549435e-38F;  // denormals count as zero
    int64_t below = int64_t{to_order(low)} - 1, above = to_order(high), count = size_, rest = 0;
    const float wanted = 0.5F * static_cast<float>(K_ + most);
    if (__builtin_fabsf(low) < kSmallest) below = to_order(-kSmallest);
    for (int step = 0; above - below > 1 && count > most; ++step) {
      const float part =
          step % 2 ? 0.5F : (wanted - static_cast<float>(rest)) / static_cast<float>(count - rest);
      int64_t middle = to_order(part * low + (1 - part) * high);
      if (step >= 20 || middle <= below || middle >= above) middle = (below + above) >> 1;
      const float threshold = from_order(static_cast<int32_t>(middle));
      const int64_t found = count_above(threshold);
      if (found >= K_) {
        below = middle;
        low = threshold;
        count = found;
      } else {
        above = middle;
        high = threshold;
        rest = found;
      }
    }
    return from_order(static_cast<int32_t>(below));
  }

  void drop_up_to(float threshold) {
    const int64_t size = size_;
    size_ = 0;
    for (int64_t i = 0; i < size; i += kLanes) {
      const Floats scores = load(scores_ + i);
      const Words indices = load_words(indices_ + i);
      append(greater(scores, all(threshold)) & first_lanes(size - i), scores, indices);
    }
  }

  void raise_threshold() {
    threshold_ = find_threshold(K_ + K_ / 4);
    drop_up_to(threshold_);
    if (size_ <= capacity_) return;
    // Too many are equal: whatever equals the smallest of K chosen comes too late from now on.
    keep_exactly_k();
    threshold_ = range().low;
  }

  void keep_exactly_k() {
    drop_up_to(find_threshold(K_));
    if (size_ <= K_) return;
    // All that are left over equal the smallest; those of the highest indices go.
    const float smallest = range().low;
    int64_t surplus = size_ - K_;
    for (int64_t i = size_ - 1; surplus > 0; --i) {
      if (scores_[i] != smallest) continue;
      indices_[i] = -1;
      --surplus;
    }
    int64_t kept = 0;
    for (int64_t i = 0; i < size_; ++i) {
      if (indices_[i] < 0) continue;
      scores_[kept] = scores_[i];
      indices_[kept++] = indices_[i];
    }
    size_ = kept;
  }

  int64_t K_ = 0, capacity_ = 0, size_ = 0;
  float threshold_ = -__builtin_inff();
  float* scores_ = nullptr;
  int32_t* indices_ = nullptr;
};

}  // namespace longhaul::cpu::LONGHAUL_ISA
