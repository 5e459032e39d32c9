// What fits one register of the instruction set, for inner loops whose sums must not lie in memory.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__SSE__)
#include <immintrin.h>
#endif

#define LONGHAUL_INLINED __attribute__((always_inline))  // behind a lambda's parameters
#define LONGHAUL_INLINE inline LONGHAUL_INLINED

// Inner loops that use all registers, of pointers too: GCC leaves too few to what it inlines around
// them, and then keeps pointers in vector registers.
#define LONGHAUL_TILE __attribute__((noinline))

namespace longhaul::cpu::LONGHAUL_ISA {

constexpr int kLanes = 16;  // of the vectors of simd.h

#if defined(__AVX512F__)
constexpr int kRegisterLanes = 16;
#elif defined(__AVX2__)
constexpr int kRegisterLanes = 8;
#else
constexpr int kRegisterLanes = 4;
#endif
constexpr int kParts = kLanes / kRegisterLanes;  // registers of such a vector

using Register = float __attribute__((vector_size(4 * kRegisterLanes), may_alias));
using RegisterWords = int32_t __attribute__((vector_size(4 * kRegisterLanes), may_alias));

template <typename V>
LONGHAUL_INLINE V load_as(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <typename V>
LONGHAUL_INLINE void store_as(void* p, V v) {
  std::memcpy(p, &v, sizeof v);
}

// Asks for elements that will soon be used, to the second cache. Functions that do no more than
// this must be inlined as well: GCC leaves out calls of functions without an effect.
template <typename T>
LONGHAUL_INLINE void prefetch(const T* from, int64_t count) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t i = 0; i < count; i += kLine) __builtin_prefetch(from + i, 0, 2);
}
// Those of a row of `length`, unless there are no rows.
template <typename T>
LONGHAUL_INLINE void prefetch_row(const T* rows, int64_t row, int64_t length) {
  if (rows) prefetch(rows + row * length, length);
}

// The word at p in all lanes; the two words at p in turn. On AVX2 as floats: GCC would shift and
// mask an integer before it is in all lanes, outside of the vector registers.
LONGHAUL_INLINE RegisterWords broadcast_word(const void* p) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  return RegisterWords(_mm256_set1_ps(load_as<float>(p)));
#else
  return RegisterWords{} + load_as<int32_t>(p);
#endif
}
LONGHAUL_INLINE RegisterWords broadcast_pair(const void* p) {
#if defined(__AVX512F__)
  return RegisterWords(_mm512_castpd_si512(_mm512_set1_pd(load_as<double>(p))));
#elif defined(__AVX2__)
  return RegisterWords(_mm256_set1_pd(load_as<double>(p)));
#else
  using Pairs = int64_t __attribute__((vector_size(4 * kRegisterLanes)));
  return RegisterWords(Pairs{} + load_as<int64_t>(p));
#endif
}

// a b + c, rounded once where there is an instruction for it.
LONGHAUL_INLINE Register fma(Register a, Register b, Register c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

// NaN in b goes through, as in x86's instructions.
LONGHAUL_INLINE Register max(Register a, Register b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#elif defined(__SSE__)
  return _mm_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}
LONGHAUL_INLINE Register min(Register a, Register b) {
#if defined(__AVX512F__)
  return _mm512_min_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_min_ps(a, b);
#elif defined(__SSE__)
  return _mm_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}

}  // namespace longhaul::cpu::LONGHAUL_ISA
