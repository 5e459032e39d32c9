// Where a head's keys and values lie; nothing outside this folder includes it.
#pragma once

#include "include/longhaul/kernels.h"
#include "longhaul/ops/cpu/query_block.h"

namespace longhaul::cpu::LONGHAUL_ISA {

// The rows of one head in one row of the batch. Values without an array of their own are the first
// columns of the keys.
struct HeadKeys {
  const char *keys, *values;
  int64_t key_bytes, value_bytes;  // of a row

  HeadKeys(const longhaul_flash_attention_args& a, int64_t b, int64_t h) {
    const int64_t size = a.dtype == LONGHAUL_FLOAT32 ? 4 : 2;
    const int64_t place = a.key_heads == 1 ? b : b * a.H + h;
    key_bytes = a.D * size;
    value_bytes = a.value ? a.V * size : key_bytes;
    keys = static_cast<const char*>(a.key) + place * a.L * key_bytes;
    values = a.value ? static_cast<const char*>(a.value) + place * a.L * value_bytes : keys;
  }
  TileRows key_tile(int64_t from, int64_t end, const char* zeros) const {
    return {keys, key_bytes, from, end, zeros};
  }
  TileRows value_tile(int64_t from, int64_t end, const char* zeros) const {
    return {values, value_bytes, from, end, zeros};
  }
};

// Zeros long enough for a row of keys and one of values.
inline int64_t zero_bytes(const longhaul_flash_attention_args& a) {
  return (a.D > a.V ? a.D : a.V) * (a.dtype == LONGHAUL_FLOAT32 ? 4 : 2);
}

// Blocks of queries of a head; an empty one for no query.
inline int64_t num_blocks(int64_t S) { return S == 0 ? 1 : (S + kBlock - 1) / kBlock; }

// The queries from t0 on of row b of the batch.
inline BlockView view_of(const longhaul_flash_attention_args& a, int64_t b, int64_t t0) {
  const int64_t row = b * a.S + t0;
  return {a.first_key + row, a.last_key + row, a.S - t0 < kBlock ? a.S - t0 : kBlock};
}

}  // namespace longhaul::cpu::LONGHAUL_ISA
