// Arrays of exact sizes for the tests of the C functions of the kernels, and the loop over random
// shapes: each array and the workspace of exactly the size that kernels.h states and at an address
// that only 4 divides.
#pragma once

#include <gtest/gtest.h>
#include <omp.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "include/longhaul/kernels.h"
#include "tests/ops/fused_kernels.h"

namespace longhaul::testing {

// An array on the heap without a byte to spare behind it; `offset` bytes lie unused before it.
class Block {
 public:
  Block(size_t bytes, size_t offset) : offset_(offset), memory_(new char[offset + bytes]) {
    // Other bytes for each offset, so that what stays unwritten makes the results differ.
    std::memset(data(), offset == 0 ? 0 : 0xff, bytes);
  }
  char* data() const { return memory_.get() + offset_; }

 private:
  size_t offset_;
  std::unique_ptr<char[]> memory_;
};

struct Shape {
  longhaul_dtype dtype;
  int64_t B, S, L, H, D, V, K;
};

// Arrays that one run reads and writes, in the order in which they were made.
class Arrays {
 public:
  Arrays(uint64_t seed, size_t offset) : random_(seed), offset_(offset) {}

  void* numbers(longhaul_dtype dtype, int64_t count, float low = -1, float high = 1) {
    std::uniform_real_distribution<float> values(low, high);
    const size_t size = dtype == LONGHAUL_FLOAT32 ? 4 : 2;
    char* to = add(static_cast<size_t>(count) * size);
    for (int64_t i = 0; i < count; ++i) {
      const float x = values(random_);
      char bits[4];
      std::memcpy(bits, &x, 4);
      std::memcpy(to + i * static_cast<int64_t>(size), bits + 4 - size, size);
    }
    return to;
  }
  float* floats(int64_t count, float low = -1, float high = 1) {
    return static_cast<float*>(numbers(LONGHAUL_FLOAT32, count, low, high));
  }

  // Distinct keys in each row, -1 anywhere; now and then a row in no order or without a key.
  int32_t* indices(int64_t rows, int64_t K, int64_t L) {
    auto* out = reinterpret_cast<int32_t*>(add(static_cast<size_t>(rows * K) * 4));
    for (int64_t row = 0; row < rows; ++row, out += K) {
      const uint64_t kind = random_() % 4;
      std::vector<int32_t> keys;
      for (int32_t key = 0; key < L && kind != 0; ++key) keys.push_back(key);
      keys.resize(static_cast<size_t>(std::max(L, K)), -1);
      if (kind != 1) std::shuffle(keys.begin(), keys.end(), random_);
      if (kind == 2) std::sort(keys.begin(), keys.begin() + K);
      std::copy(keys.begin(), keys.begin() + K, out);
    }
    return out - rows * K;
  }

  void* result(longhaul_dtype dtype, int64_t count) {
    results_.push_back(blocks_.size());
    result_bytes_.push_back(static_cast<size_t>(count) * (dtype == LONGHAUL_FLOAT32 ? 4 : 2));
    return add(result_bytes_.back());
  }
  float* result_floats(int64_t count) {
    return static_cast<float*>(result(LONGHAUL_FLOAT32, count));
  }

  // Read and replaced.
  void* replaced(longhaul_dtype dtype, int64_t count) {
    results_.push_back(blocks_.size());
    result_bytes_.push_back(static_cast<size_t>(count) * (dtype == LONGHAUL_FLOAT32 ? 4 : 2));
    return numbers(dtype, count, -20, 20);
  }

  template <typename Args>
  void run(const char* (*kernel)(const Args*, void*), size_t (*workspace)(const Args*),
           const Args& args) {
    const Block memory(workspace(&args), offset_);
    EXPECT_STREQ(kernel(&args, memory.data()), nullptr);
  }

  // Every byte of the results, one after the other.
  std::string results() const {
    std::string all;
    for (size_t i = 0; i < results_.size(); ++i) {
      all.append(blocks_[results_[i]].data(), result_bytes_[i]);
    }
    return all;
  }
  std::mt19937_64& random() { return random_; }

 private:
  char* add(size_t bytes) { return blocks_.emplace_back(bytes, offset_).data(); }

  std::mt19937_64 random_;
  size_t offset_;
  std::vector<Block> blocks_;
  std::vector<size_t> results_, result_bytes_;
};

inline Shape random_shape(uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto any = [&](int64_t low, int64_t high) {
    return low + static_cast<int64_t>(random() % static_cast<uint64_t>(high - low + 1));
  };
  Shape s = {};
  s.dtype = any(0, 1) == 0 ? LONGHAUL_FLOAT32 : LONGHAUL_BFLOAT16;
  s.B = any(1, 2);
  s.S = any(1, 50);
  s.L = any(0, 4) == 0 ? any(600, 1500) : any(1, 90);  // past the buffer of the top-k
  s.H = any(0, 3) == 0 ? any(1, 128) : any(1, 17);
  s.V = 32 * any(1, 3);
  s.D = s.V + 32 * any(0, 2);
  s.K = any(1, 70);
  return s;
}

using RunFunction = void (*)(const Shape&, Arrays&);

// The results are the same wherever the arrays lie and on any number of threads.
inline void run_at_random_shapes(RunFunction run) {
  const int before = omp_get_max_threads();
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    const Shape s = random_shape(seed);
    SCOPED_TRACE(::testing::Message() << "seed " << seed << ": H " << s.H << " D " << s.D << " V "
                                      << s.V << " K " << s.K << " S " << s.S << " L " << s.L);
    Arrays apart(seed, 4), aligned(seed, 0);
    omp_set_num_threads(3);
    run(s, apart);
    omp_set_num_threads(1);
    run(s, aligned);
    EXPECT_TRUE(apart.results() == aligned.results());
  }
  omp_set_num_threads(before);
}

}  // namespace longhaul::testing
