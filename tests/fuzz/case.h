// One run of a kernel on what an input of the fuzzer says: sizes, contents of arrays, threads.
// Every array has exactly the bytes that kernels.h states, so that AddressSanitizer sees an element
// too much, and none at all if a size is wrong: the kernel has to refuse before it reads.
#pragma once

#include <fuzzer/FuzzedDataProvider.h>
#include <omp.h>

#include <algorithm>
#include <cfloat>
#include <climits>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "include/longhaul/kernels.h"

namespace longhaul::fuzz {

[[noreturn]] inline void fail(const char* what, const char* detail = "") {
  std::fprintf(stderr, "kernels_fuzz: %s%s\n", what, detail);
  std::abort();
}

class Case {
 public:
  static constexpr int64_t kLowest = INT64_MIN, kHighest = INT64_MAX;

  // The second of the two runs of an input has its arrays 4 bytes behind a multiple of 8, and other
  // bytes in what the kernel should write.
  Case(const uint8_t* data, size_t size, int threads, bool second)
      : input_(data, size), offset_(second ? 4 : 0), fill_(second ? 0xff : 0) {
    omp_set_num_threads(threads);
    random_.seed(input_.ConsumeIntegral<uint16_t>());
    magnitude_ = input_.ConsumeIntegralInRange(0, 4);
    some_wrong_ = input_.ConsumeIntegralInRange(0, 7) == 7;
  }

  int64_t number(int64_t low, int64_t high) { return input_.ConsumeIntegralInRange(low, high); }
  bool flip() { return input_.ConsumeBool(); }
  bool rarely() { return number(0, 15) == 15; }

  // A size that kernels.h allows, or one of the wrong ones.
  int64_t size(int64_t low, int64_t high, std::initializer_list<int64_t> wrong) {
    if (!some_wrong_ || number(0, 3) != 3) return number(low, high);
    is_valid_ = false;
    return wrong.begin()[number(0, static_cast<int64_t>(wrong.size()) - 1)];
  }
  int64_t batch() { return size(0, 2, {-1, kLowest}); }
  int64_t queries() { return size(0, rarely() ? 70 : 12, {-1, kLowest}); }
  int64_t keys() { return size(0, rarely() ? 300 : 70, {-1, kLowest, (1 << 30) + 1, kHighest}); }
  int64_t heads() { return size(1, rarely() ? 128 : 18, {0, -1, 129, kLowest, kHighest}); }
  int64_t columns() { return 32 * size(1, 3, {0, -1}) + size(0, 0, {1, 31, -2}); }
  int64_t chosen_keys() { return size(1, 70, {0, -1, kLowest}); }
  // Wide enough, now and then, for a row-wise kernel to use several threads.
  int64_t width(int64_t low) { return size(low, rarely() ? 20000 : 150, {low - 1, -1, kLowest}); }

  // What an enum in C may also hold goes in as bytes.
  void dtype(longhaul_dtype& to) {
    const auto value = static_cast<int32_t>(size(0, 1, {2, -1}));
    std::memcpy(&to, &value, sizeof value);
    is_bf16_ = value == LONGHAUL_BFLOAT16;
  }

  void must_be(bool right) { is_valid_ = is_valid_ && right; }
  // The arguments break a promise that no check can see cheaply: nothing may be damaged, but the
  // results may be anything.
  void break_promise() { is_determined_ = false; }
  bool is_valid() const { return is_valid_; }
  bool is_bf16() const { return is_bf16_; }
  bool is_tame() const { return is_determined_ && magnitude_ < 3; }
  bool is_finite() const { return is_determined_ && magnitude_ < 4; }

  // Inputs. `low` bounds them from below, for what is a probability or a square.
  float* floats(int64_t count, float low = -FLT_MAX) {
    auto* to = reinterpret_cast<float*>(add(count, 4, offset_));
    fill(count, low, [&](int64_t i, float x) { to[i] = x; });
    return to;
  }
  void* typed(int64_t count, float low = -FLT_MAX) {
    if (!is_bf16_) return floats(count, low);
    auto* to = reinterpret_cast<uint16_t*>(add(count, 2, offset_));
    fill(count, low, [&](int64_t i, float x) { to[i] = to_bf16(x); });
    return to;
  }
  template <typename T>
  T* integers(int64_t count) {
    return reinterpret_cast<T*>(add(count, sizeof(T), sizeof(T) == 8 ? 0 : offset_));
  }
  int32_t* indices(int64_t rows, int64_t K, int64_t L);
  void ranges(int64_t rows, int64_t S, int64_t L, const int64_t*& first, const int64_t*& last);
  int64_t* counts(int64_t E, int64_t M);
  int64_t* permutation(int64_t n);

  // Outputs, and what is both. They are compared between the two runs.
  float* result_floats(int64_t count) {
    return reinterpret_cast<float*>(keep(add(count, 4, offset_)));
  }
  int32_t* result_indices(int64_t count) {
    return reinterpret_cast<int32_t*>(keep(add(count, 4, offset_)));
  }
  void* result(int64_t count) { return keep(add(count, is_bf16_ ? 2 : 4, offset_)); }
  template <typename T>
  T* keep(T* array) {
    results_.push_back(arrays_.size() - 1);
    return array;
  }

  // Whether it computed. It has to refuse exactly what kernels.h excludes.
  template <typename Args>
  bool run(const char* (*kernel)(const Args*), const Args& args) {
    return is_done(kernel(&args));
  }
  template <typename Args>
  bool run(const char* (*kernel)(const Args*, void*), size_t (*workspace)(const Args*),
           const Args& args) {
    const size_t bytes = workspace(&args);
    return is_done(kernel(&args, add(static_cast<int64_t>(bytes), 1, offset_)));
  }

  // No NaN where the inputs give no cause.
  void expect_numbers(const float* x, int64_t count, const char* name) const {
    for (int64_t i = 0; i < count; ++i) {
      if (std::isnan(x[i])) fail("NaN from numbers in ", name);
    }
  }
  void expect_numbers(const void* x, int64_t count, const char* name) const {
    expect_numbers(is_bf16_ ? LONGHAUL_BFLOAT16 : LONGHAUL_FLOAT32, x, count, name);
  }
  void expect_numbers(longhaul_dtype dtype, const void* x, int64_t count, const char* name) const {
    if (dtype == LONGHAUL_FLOAT32) {
      return expect_numbers(static_cast<const float*>(x), count, name);
    }
    for (int64_t i = 0; i < count; ++i) {
      if ((static_cast<const uint16_t*>(x)[i] & 0x7fff) > 0x7f80)
        fail("NaN from numbers in ", name);
    }
  }

  // The error, or every byte of the results.
  std::string outcome() const {
    if (!error_.empty()) return error_;
    std::string all;
    for (const size_t i : results_) all.append(arrays_[i].data, arrays_[i].bytes);
    return is_determined_ ? all : "";
  }

 private:
  struct Array {
    std::unique_ptr<char[]> memory;
    char* data;
    size_t bytes;
  };

  static uint16_t to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return static_cast<uint16_t>(bits >> 16 | (std::isnan(x) ? 0x40 : 0));
  }

  char* add(int64_t count, size_t element, size_t offset) {
    const size_t bytes = is_valid_ ? static_cast<size_t>(count) * element : 0;
    Array array = {std::unique_ptr<char[]>(new char[offset + bytes]), nullptr, bytes};
    array.data = array.memory.get() + offset;
    std::memset(array.data, fill_, bytes);
    return arrays_.emplace_back(std::move(array)).data;
  }

  int64_t any(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(random_() % static_cast<uint64_t>(high - low + 1));
  }

  // A few values of a list, so that there are ties, or numbers between -2 and 2.
  template <typename Put>
  void fill(int64_t count, float low, const Put& put) {
    static constexpr float kValues[] = {0,       -0.0F,    1,       -1,       0.5F,    1e-40F,
                                        -1e-45F, 1e-20F,   FLT_MAX, -FLT_MAX, FLT_MIN, 1e30F,
                                        -1e19F,  INFINITY, NAN,     -INFINITY};
    static constexpr int kListed[] = {8, 8, 8, 13, 16};  // by magnitude
    const int64_t kind = number(0, 3), listed = kListed[magnitude_];
    const int64_t from = kind == 3 ? any(0, listed - 1) : 0, to = kind == 3 ? from : listed - 1;
    if (!is_valid_) return;
    for (int64_t i = 0; i < count; ++i) {
      const bool is_listed = kind == 1 ? any(0, 7) == 0 : kind != 0;
      const float x =
          is_listed ? kValues[any(from, to)] : static_cast<float>(any(-2000, 2000)) * 1e-3F;
      put(i, x < low ? -x : x);
    }
  }

  bool is_done(const char* error) {
    if (error && is_valid_) fail("refused, though kernels.h allows it: ", error);
    if (!error && !is_valid_) fail("accepted, though kernels.h excludes it");
    if (error) error_ += error;
    return !error;
  }

  FuzzedDataProvider input_;
  std::minstd_rand random_;
  size_t offset_;
  int fill_;
  int magnitude_;  // 0 to 2: small numbers; 3: all finite ones; 4: infinities and NaN as well
  bool some_wrong_, is_valid_ = true, is_determined_ = true, is_bf16_ = false;
  std::string error_;
  std::vector<Array> arrays_;
  std::vector<size_t> results_;
};

// Rows of keys: ascending with a tail of -1, in any order with gaps, none, some twice, or one that
// is out of range.
inline int32_t* Case::indices(int64_t rows, int64_t K, int64_t L) {
  auto* out = integers<int32_t>(rows * K);
  const int64_t kind = number(0, 7);
  if (!is_valid_) return out;
  std::vector<int32_t> keys(static_cast<size_t>(L));
  for (int64_t row = 0; row < rows; ++row) {
    std::iota(keys.begin(), keys.end(), 0);
    std::shuffle(keys.begin(), keys.end(), random_);
    std::vector<int32_t> chosen(keys.begin(), keys.begin() + any(0, std::min(L, K)));
    if (kind <= 2) std::sort(chosen.begin(), chosen.end());
    chosen.resize(static_cast<size_t>(K), -1);
    if (kind > 2) std::shuffle(chosen.begin(), chosen.end(), random_);
    if (kind == 5) std::fill(chosen.begin(), chosen.end(), -1);
    if (kind == 6 && L > 0) chosen[0] = chosen.back() = static_cast<int32_t>(any(0, L - 1));
    std::copy(chosen.begin(), chosen.end(), out + row * K);
  }
  if (kind == 6 && K > 1) break_promise();
  if (kind == 7 && some_wrong_ && rows * K > 0) {
    const int64_t wrong[] = {-2, L, INT32_MIN, INT32_MAX};
    out[any(0, rows * K - 1)] = static_cast<int32_t>(wrong[number(0, 3)]);
    must_be(false);
  }
  return out;
}

// Documents that attend to themselves, any range, none (whatever the two numbers are), or one that
// leaves the keys.
inline void Case::ranges(int64_t rows, int64_t S, int64_t L, const int64_t*& first,
                         const int64_t*& last) {
  auto *from = integers<int64_t>(rows), *to = integers<int64_t>(rows);
  first = from;
  last = to;
  const int64_t kind = number(0, 4);
  if (!is_valid_) return;
  int64_t document = 0;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t t = row % S;
    if (t == 0 || any(0, 5) == 0) document = t;
    from[row] = kind == 0 ? 0 : kind == 1 ? document : any(0, std::max<int64_t>(L - 1, 0));
    to[row] = kind <= 1 ? std::min(t, L - 1) : any(-1, L - 1);
    if (L == 0) to[row] = -1;
    if (kind == 3 && any(0, 2) == 0) {
      from[row] = any(0, 1) ? kHighest : 0;
      to[row] = any(0, 1) ? kLowest : -1;
    }
  }
  if (kind == 4 && some_wrong_ && rows > 0) {
    const int64_t row = any(0, rows - 1);
    flip() ? (from[row] = flip() ? -1 : kLowest, to[row] = std::max<int64_t>(L - 1, 0))
           : (from[row] = 0, to[row] = flip() ? L : kHighest);
    must_be(false);
  }
}

// Rows of E groups among M: empty ones, all in one, fewer than M, or too many.
inline int64_t* Case::counts(int64_t E, int64_t M) {
  auto* out = integers<int64_t>(E);
  const int64_t kind = number(0, 4);
  if (!is_valid_) return out;
  int64_t left = M;
  for (int64_t e = 0; e < E; ++e) {
    out[e] = any(0, 2) == 0 ? 0 : any(0, left);
    if (kind == 1) out[e] = e == E / 2 ? left : 0;
    if (kind == 2 && e == E - 1) out[e] = left;
    left -= out[e];
  }
  if (kind == 4 && some_wrong_ && E > 0) {
    const int64_t wrong[] = {-1, M + 1, kLowest, kHighest};
    out[any(0, E - 1)] = wrong[number(0, 3)];
    must_be(false);
  }
  return out;
}

// Of 0 .. n - 1; or with one number twice, or with one that is out of range.
inline int64_t* Case::permutation(int64_t n) {
  auto* out = integers<int64_t>(n);
  const int64_t kind = number(0, 4);
  if (!is_valid_) return out;
  std::iota(out, out + n, 0);
  if (kind > 0) std::shuffle(out, out + n, random_);
  if (kind == 3 && n > 1) {
    out[0] = out[n - 1];
    break_promise();
  }
  if (kind == 4 && some_wrong_ && n > 0) {
    const int64_t wrong[] = {-1, n, kLowest, kHighest};
    out[any(0, n - 1)] = wrong[number(0, 3)];
    must_be(false);
  }
  return out;
}

}  // namespace longhaul::fuzz
