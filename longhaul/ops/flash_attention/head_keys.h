// Where a head's keys and values lie; nothing outside this folder includes it.
#pragma once

#include "include/longhaul/kernels.h"
#include "longhaul/ops/cpu/operands.h"
#include "longhaul/ops/cpu/query_block.h"

namespace longhaul::cpu::LONGHAUL_ISA {

// The keys and values of all heads as operands. Values without an array of their own are the first
// columns of the keys.
template <typename T>
struct AllKeys {
  Operands<T> keys, values;

  AllKeys(const longhaul_flash_attention_args& a, Workspace& workspace)
      : keys(a.key, rows(a) * a.D, workspace),
        values(a.value, a.value ? rows(a) * a.V : 0, workspace) {}
  static int64_t rows(const longhaul_flash_attention_args& a) {
    return (a.key_heads == 1 ? a.B : a.B * a.H) * a.L;
  }
  // On all threads of the enclosing parallel region.
  void widen() const {
    keys.widen();
    values.widen();
  }
};

// The rows of one head in one row of the batch.
struct HeadKeys {
  const char *keys, *values;
  int64_t key_bytes, value_bytes;  // of a row

  template <typename T>
  HeadKeys(const longhaul_flash_attention_args& a, const AllKeys<T>& all, int64_t b, int64_t h) {
    const int64_t size = sizeof(Operand<T>);
    const int64_t place = a.key_heads == 1 ? b : b * a.H + h;
    key_bytes = a.D * size;
    value_bytes = a.value ? a.V * size : key_bytes;
    keys = reinterpret_cast<const char*>(all.keys.get()) + place * a.L * key_bytes;
    values = a.value ? reinterpret_cast<const char*>(all.values.get()) + place * a.L * value_bytes
                     : keys;
  }
  TileRows key_tile(int64_t from, int64_t end, const char* zeros) const {
    return {keys, key_bytes, from, end, zeros};
  }
  TileRows value_tile(int64_t from, int64_t end, const char* zeros) const {
    return {values, value_bytes, from, end, zeros};
  }
};

// Zeros long enough for a row of keys and one of values, whatever the operands.
inline int64_t zero_bytes(const longhaul_flash_attention_args& a) {
  return (a.D > a.V ? a.D : a.V) * static_cast<int64_t>(sizeof(float));
}

// Blocks of queries of a head; an empty one for no query.
inline int64_t num_blocks(int64_t S) { return S == 0 ? 1 : (S + kBlock - 1) / kBlock; }

// The queries from t0 on of row b of the batch.
inline BlockView view_of(const longhaul_flash_attention_args& a, int64_t b, int64_t t0) {
  const int64_t row = b * a.S + t0;
  return {a.first_key + row, a.last_key + row, a.S - t0 < kBlock ? a.S - t0 : kBlock};
}

}  // namespace longhaul::cpu::LONGHAUL_ISA
