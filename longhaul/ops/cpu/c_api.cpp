#include "longhaul/ops/cpu/c_api.h"

#include <atomic>
#include <cstring>
#include <utility>

namespace longhaul::cpu {
namespace {

constexpr int64_t kMaxKeys = int64_t{1} << 30;  // indices are int32
constexpr int64_t kMaxColumns = 1 << 20;        // so that a row's bytes can be counted

}  // namespace

const char* keep_error(std::string text) {
  thread_local std::string kept;
  kept = std::move(text);
  return kept.c_str();
}

// By its bytes: C lets any number stand there, C++ none but the two.
const char* check_dtype(const longhaul_dtype& dtype) {
  int32_t value;
  static_assert(sizeof value == sizeof dtype);
  std::memcpy(&value, &dtype, sizeof value);
  if (value == LONGHAUL_FLOAT32 || value == LONGHAUL_BFLOAT16) return nullptr;
  return wrong("dtype: expected LONGHAUL_FLOAT32 (0) or LONGHAUL_BFLOAT16 (1), got {}", value);
}

const char* check_at_least(int64_t lowest, int64_t value, const char* name) {
  return value >= lowest ? nullptr : wrong("{}: expected at least {}, got {}", name, lowest, value);
}

const char* check_columns(int64_t value, const char* name) {
  if (value >= 1 && value % 32 == 0) return nullptr;
  return wrong("{}: expected a positive multiple of 32, got {}", name, value);
}

const char* check_key_heads(int64_t key_heads, int64_t H) {
  if (key_heads == 1 || key_heads == H) return nullptr;
  return wrong("key_heads: expected 1 or {} (H), got {}", H, key_heads);
}

const char* check_block(int64_t S) {
  return S <= 128 ? nullptr : wrong("S: expected at most 128 queries, got {}", S);
}

const char* check_attention(int64_t B, int64_t S, int64_t L, int64_t H, int64_t D, int64_t K) {
  if (const char* error = check_at_least(0, B, "B")) return error;
  if (const char* error = check_at_least(0, S, "S")) return error;
  if (const char* error = check_at_least(0, L, "L")) return error;
  if (L > kMaxKeys) return wrong("L: expected at most 2^30 keys, got {}", L);
  if (H < 1 || H > 128) return wrong("H: expected 1 to 128 heads, got {}", H);
  if (const char* error = check_at_least(1, D, "D")) return error;
  if (D > kMaxColumns) return wrong("D: expected at most 2^20 columns, got {}", D);
  if (K > kMaxKeys) return wrong("K: expected at most 2^30 keys, got {}", K);
  return check_at_least(1, K, "K");
}

const char* check_indices(const int32_t* indices, int64_t rows, int64_t K, int64_t L) {
  std::atomic<bool> is_wrong = false;
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    int32_t highest = -1, lowest = 0;
    for (int64_t i = row * K; i < (row + 1) * K; ++i) {
      lowest = indices[i] < lowest ? indices[i] : lowest;
      highest = indices[i] > highest ? indices[i] : highest;
    }
    if (lowest < -1 || highest >= L) is_wrong = true;
  }
  for (int64_t i = 0; is_wrong && i < rows * K; ++i) {
    if (indices[i] >= -1 && indices[i] < L) continue;
    return wrong("indices: expected -1 to {} (L - 1), got {} in row {}", L - 1, indices[i], i / K);
  }
  return nullptr;
}

const char* check_ranges(const int64_t* first_key, const int64_t* last_key, int64_t rows,
                         int64_t L) {
  for (int64_t i = 0; i < rows; ++i) {
    const bool none = first_key[i] > last_key[i];
    if (none || (first_key[i] >= 0 && last_key[i] < L)) continue;
    return wrong("first_key and last_key: expected 0 to {} (L - 1), got {} and {} of query {}",
                 L - 1, first_key[i], last_key[i], i);
  }
  return nullptr;
}

// Groups may not hold more rows than there are.
const char* check_counts(const int64_t* counts, int64_t M, int64_t E) {
  int64_t rows = 0;
  for (int64_t e = 0; e < E; ++e) {
    if (counts[e] < 0) return wrong("counts[{}]: expected at least 0, got {}", e, counts[e]);
    if (counts[e] > M - rows) {
      return wrong("counts: expected together at most {} (M), got {} and {} more in group {}", M,
                   rows, counts[e], e);
    }
    rows += counts[e];
  }
  return nullptr;
}

const char* check_inverse(const int64_t* inverse, int64_t rows) {
  for (int64_t i = 0; i < rows; ++i) {
    if (inverse[i] >= 0 && inverse[i] < rows) continue;
    return wrong("inverse: expected 0 to {} (T k - 1), got {}", rows - 1, inverse[i]);
  }
  return nullptr;
}

}  // namespace longhaul::cpu

using longhaul::cpu::check_dtype;
using longhaul::cpu::chosen_isa;
using longhaul::cpu::kernels;
using longhaul::cpu::without_exceptions;

extern "C" {

double longhaul_kernels_peak_flops(longhaul_dtype dtype, double seconds) {
  double flops = 0;
  without_exceptions([&] {
    const char* error = check_dtype(dtype);
    if (!error) flops = kernels().peak_flops(dtype, seconds);
    return error;
  });
  return flops;
}

const char* longhaul_kernels_isa(void) {
  const char* name = nullptr;
  without_exceptions([&] { return name = longhaul::cpu::name_of(chosen_isa().isa); });
  return name;
}

const char* longhaul_kernels_isa_reason(void) {
  return without_exceptions([] { return chosen_isa().reason.c_str(); });
}

}  // extern "C"
