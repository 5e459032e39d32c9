// Rows of tokens to their experts and back. Both go through the tokens in order: a token's row is
// read or written once, its k rows at the experts come or go one stream each.
#include "include/longhaul/kernels.h"
#include "longhaul/ops/cpu/kernel_table.h"
#include "longhaul/ops/cpu/rows.h"

namespace longhaul::cpu::LONGHAUL_ISA {
namespace {

using PermuteArgs = longhaul_moe_token_permute_args;
using UnpermuteArgs = longhaul_moe_token_unpermute_args;

// Bit by bit: a conversion could flush denormals. Streamed rows are whole lines.
template <bool kStream, typename T>
LONGHAUL_INLINE void copy_row(const T* from, int64_t D, T* to) {
  const auto copy = [](const T* some, int64_t n, T* there) LONGHAUL_INLINED {
    std::memcpy(there, some, static_cast<size_t>(n) * sizeof(T));
  };
  if constexpr (kStream) {
    stream_rows<1>({to}, D, [&](int64_t i, int64_t count, auto& block) LONGHAUL_INLINED {
      copy(from + i, count, block[0]);
    });
  } else {
    copy(from, D, to);
  }
}

template <typename T, bool kStream>
void permute_token(const PermuteArgs& a, int64_t token) {
  const T* from = static_cast<const T*>(a.tokens) + token * a.D;
  for (int64_t choice = token * a.k; choice < (token + 1) * a.k; ++choice) {
    T* to = static_cast<T*>(a.permuted) + a.inverse[choice] * a.D;
    const T* row = a.d_probs ? static_cast<const T*>(a.rows) + a.inverse[choice] * a.D : nullptr;
    if (!a.probs) {
      copy_row<kStream>(from, a.D, to);
      const auto product = [&](int64_t i, auto part) LONGHAUL_INLINED {
        return load_as_floats(from + i, part) * load_as_floats(row + i, part);
      };
      if (row) a.d_probs[choice] = sum_over(a.D, product);
    } else {
      const float p = a.probs[choice];
      Floats dots[4] = {};  // lose less than one
      write_row<kStream>(to, a.D, [&](int64_t i, auto part) LONGHAUL_INLINED {
        const Floats v = load_as_floats(from + i, part);
        Floats& dot = dots[i / kLanes % 4];
        if (row) dot = fma(v, load_as_floats(row + i, part), dot);
        return v * p;
      });
      if (row) a.d_probs[choice] = sum((dots[0] + dots[1]) + (dots[2] + dots[3]));
    }
  }
}

struct Columns {
  int64_t from, count;
};

// Weighs kRows rows of a token, from the choice `first` on, adds them to `sums` (none yet where
// that is null), and writes these columns.
template <int kRows, bool kStream, typename T, typename Out>
LONGHAUL_INLINE void add_rows(const UnpermuteArgs& a, int64_t first, const Columns& columns,
                              const float* sums, Out* out) {
  const T* rows[kRows];
  float p[kRows];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    rows[r] = static_cast<const T*>(a.permuted) + a.inverse[first + r] * a.D + columns.from;
    p[r] = a.probs ? a.probs[first + r] : 1;
  }
  write_row<kStream>(out, columns.count, [&](int64_t i, auto part) LONGHAUL_INLINED {
    Floats sum = sums ? load_as_floats(sums + i, part) : Floats{};
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) sum = fma(load_as_floats(rows[r] + i, part), all(p[r]), sum);
    return sum;
  });
}

// A few rows at a time, many columns of each in a row, as memory is read fastest.
template <typename T, bool kStream>
void unpermute_token(const UnpermuteArgs& a, int64_t token) {
  constexpr int kRows = 4;
  constexpr int64_t kColumns = 2048;  // whose sums stay in the first cache
  alignas(64) float sums[kColumns];
  for (int64_t from = 0; from < a.D; from += kColumns) {
    const Columns columns = {from, a.D - from < kColumns ? a.D - from : kColumns};
    T* out = static_cast<T*>(a.tokens) + token * a.D + from;
    const float* so_far = nullptr;
    int64_t i = token * a.k;
    const int64_t end = i + a.k;
    for (; end - i > kRows; i += kRows, so_far = sums) {
      add_rows<kRows, false, T>(a, i, columns, so_far, sums);
    }
    switch (end - i) {
      case 0:
        std::memset(out, 0, static_cast<size_t>(columns.count) * sizeof(T));
        break;
      case 1:
        add_rows<1, kStream, T>(a, i, columns, so_far, out);
        break;
      case 2:
        add_rows<2, kStream, T>(a, i, columns, so_far, out);
        break;
      case 3:
        add_rows<3, kStream, T>(a, i, columns, so_far, out);
        break;
      default:
        add_rows<4, kStream, T>(a, i, columns, so_far, out);
    }
  }
}

}  // namespace

void moe_token_permute(const PermuteArgs& a) {
  const int64_t row_bytes = a.D * bytes_of(a.dtype);
  with_type(a.dtype, is_streamed(a.permuted, a.T * a.k * row_bytes, row_bytes),
            [&]<typename T, bool kStream>() {
              in_parallel<kStream>(a.T, a.k * a.D,
                                   [&](int64_t token) { permute_token<T, kStream>(a, token); });
            });
}

void moe_token_unpermute(const UnpermuteArgs& a) {
  const int64_t row_bytes = a.D * bytes_of(a.dtype);
  with_type(a.dtype, is_streamed(a.tokens, a.T * row_bytes, row_bytes),
            [&]<typename T, bool kStream>() {
              in_parallel<kStream>(a.T, a.k * a.D,
                                   [&](int64_t token) { unpermute_token<T, kStream>(a, token); });
            });
}

}  // namespace longhaul::cpu::LONGHAUL_ISA
