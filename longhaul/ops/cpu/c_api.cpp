#include "longhaul/ops/cpu/c_api.h"

#include <atomic>
#include <cstring>

namespace longhaul::cpu {
namespace {

constexpr int64_t kMaxKeys = int64_t{1} << 30;  // indices are int32

}  // namespace

// By its bytes: C lets any number stand there, C++ none but the two.
bool is_dtype(const longhaul_dtype& dtype) {
  int32_t value;
  static_assert(sizeof value == sizeof dtype);
  std::memcpy(&value, &dtype, sizeof value);
  return value == LONGHAUL_FLOAT32 || value == LONGHAUL_BFLOAT16;
}

const char* check_attention(int64_t B, int64_t S, int64_t L, int64_t H, int64_t D, int64_t K) {
  if (B < 0 || S < 0 || L < 0) return "B, S and L must not be negative";
  if (L > kMaxKeys) return "at most 2^30 keys";
  if (H < 1 || H > 128) return "H must be 1 to 128";
  if (D < 1) return "D must be at least 1";
  if (K < 1) return "K must be at least 1";
  return nullptr;
}

const char* check_indices(const int32_t* indices, int64_t rows, int64_t K, int64_t L) {
  std::atomic<bool> wrong = false;
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    int32_t highest = -1, lowest = 0;
    for (int64_t i = row * K; i < (row + 1) * K; ++i) {
      lowest = indices[i] < lowest ? indices[i] : lowest;
      highest = indices[i] > highest ? indices[i] : highest;
    }
    if (lowest < -1 || highest >= L) wrong = true;
  }
  return wrong ? "an index is outside -1 .. L - 1" : nullptr;
}

const char* check_ranges(const int64_t* first_key, const int64_t* last_key, int64_t rows,
                         int64_t L) {
  for (int64_t i = 0; i < rows; ++i) {
    const bool none = first_key[i] > last_key[i];
    if (!none && (first_key[i] < 0 || last_key[i] >= L)) {
      return "first_key and last_key must lie in 0 .. L - 1";
    }
  }
  return nullptr;
}

// Groups may not hold more rows than there are.
const char* check_counts(const int64_t* counts, int64_t M, int64_t E) {
  int64_t rows = 0;
  for (int64_t e = 0; e < E; ++e) {
    if (counts[e] < 0) return "counts must not be negative";
    if (counts[e] > M - rows) return "counts add up to more than M";
    rows += counts[e];
  }
  return nullptr;
}

const char* check_inverse(const int64_t* inverse, int64_t rows) {
  for (int64_t i = 0; i < rows; ++i) {
    if (inverse[i] < 0 || inverse[i] >= rows) return "inverse must lie in 0 .. T k - 1";
  }
  return nullptr;
}

}  // namespace longhaul::cpu

extern "C" {

double longhaul_kernels_peak_flops(longhaul_dtype dtype, double seconds) {
  return longhaul::cpu::kernels().peak_flops(dtype, seconds);
}

const char* longhaul_kernels_isa(void) {
  return longhaul::cpu::name_of(longhaul::cpu::chosen_isa().isa);
}

const char* longhaul_kernels_isa_reason(void) { return longhaul::cpu::chosen_isa().reason.c_str(); }

}  // extern "C"
