// Sixteen fp32 lanes on any x86, for the kernels of this folder. A source that includes this is
// compiled once for each instruction set (see isa.h), each time into a namespace of its own: what
// is not a single instruction somewhere is written out here and in register.h. Beside these only
// the sizes of tiles and a few orders of lanes (tile.h) depend on the instruction set. + - * / and
// comparisons are operators, of GCC's vectors or of class Wide.
//
// A 32-bit word holds one fp32 or a pair of bf16; dot<T> multiplies word by word and adds up in
// fp32, so that kernels are the same for both dtypes: kPack<T> elements a word.
#pragma once

#include <cstdint>
#include <cstring>

#include "longhaul/ops/cpu/register.h"
#if !defined(__AVX512F__)
#include "longhaul/ops/cpu/wide.h"
#endif

namespace longhaul::cpu::LONGHAUL_ISA {

#if defined(__AVX512F__)
using Floats = Register;
using Words = RegisterWords;
#else
using Floats = Wide<float>;
using Words = Wide<int32_t>;
#endif
using Mask = uint32_t;  // one bit a lane

struct bf16 {
  uint16_t bits;
};

template <typename T>
constexpr int kPack = 4 / sizeof(T);

LONGHAUL_INLINE Mask first_lanes(int64_t n) { return n >= kLanes ? 0xffffU : (1U << n) - 1; }

LONGHAUL_INLINE Floats load(const void* p) {
  Floats v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
LONGHAUL_INLINE void store(void* p, Floats v) { std::memcpy(p, &v, sizeof v); }
LONGHAUL_INLINE Words load_words(const void* p) {
  Words v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
LONGHAUL_INLINE void store_words(void* p, Words v) { std::memcpy(p, &v, sizeof v); }

LONGHAUL_INLINE Floats all(float x) { return Floats{} + x; }
LONGHAUL_INLINE Words all_words(int32_t x) { return Words{} + x; }
LONGHAUL_INLINE Words lane_numbers() {
  constexpr int32_t kNumbers[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load_words(kNumbers);
}
#if defined(__AVX512F__)

// The two floats at p in turn in all lanes.
LONGHAUL_INLINE Floats all_pairs(const float* p) { return Floats(broadcast_pair(p)); }
// a where the lane of the mask is set, all of its bits, else b.
template <typename V>
LONGHAUL_INLINE V choose(Words mask, V a, V b) {
  return mask ? a : b;
}
// Lane i of the result is lane kFrom[i] of a, or from 16 on of b.
template <int... kFrom, typename V>
LONGHAUL_INLINE V shuffle(V a, V b) {
  return __builtin_shuffle(a, b, Words{kFrom...});
}
LONGHAUL_INLINE Words logical_shift_right(Words x, int bits) {
  using Unsigned = uint32_t __attribute__((vector_size(64)));
  return Words(Unsigned(x) >> bits);
}
// Kept from becoming part of a fused multiply-add.
LONGHAUL_INLINE Floats barrier(Floats x) { return __builtin_assoc_barrier(x); }
LONGHAUL_INLINE Mask greater(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
// Also where either is NaN.
LONGHAUL_INLINE Mask not_at_most(Floats a, Floats b) {
  return _mm512_cmp_ps_mask(a, b, _CMP_NLE_UQ);
}
LONGHAUL_INLINE Mask at_most(Words a, Words b) {
  return _mm512_cmple_epi32_mask(__m512i(a), __m512i(b));
}
// a where the mask is set, else b.
LONGHAUL_INLINE Floats select(Mask m, Floats a, Floats b) {
  return _mm512_mask_blend_ps(static_cast<__mmask16>(m), b, a);
}
// Writes the lanes of the mask next to each other; up to 16 elements behind them are overwritten.
LONGHAUL_INLINE void compress(Mask m, Floats v, float* to) {
  store(to, _mm512_maskz_compress_ps(static_cast<__mmask16>(m), v));
}
LONGHAUL_INLINE void compress(Mask m, Words v, int32_t* to) {
  store_words(to, Words(_mm512_maskz_compress_epi32(static_cast<__mmask16>(m), __m512i(v))));
}
LONGHAUL_INLINE Floats exponent(Floats x) { return _mm512_getexp_ps(x); }
LONGHAUL_INLINE Floats mantissa(Floats x) {
  return _mm512_getmant_ps(x, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_src);
}
LONGHAUL_INLINE float sum(Floats v) { return _mm512_reduce_add_ps(v); }
LONGHAUL_INLINE float largest(Floats v) { return _mm512_reduce_max_ps(v); }

#else

LONGHAUL_INLINE Floats all_pairs(const float* p) {
  return Floats::of([&](int) { return Register(broadcast_pair(p)); });
}
template <typename V>
LONGHAUL_INLINE V choose(Words mask, V a, V b) {
  return V::of([&](int p) { return mask.part[p] ? a.part[p] : b.part[p]; });
}
template <int... kFrom, typename V>
LONGHAUL_INLINE V shuffle(V a, V b) {
  using Whole = int32_t __attribute__((vector_size(4 * kLanes)));
  return load_as<V>(&static_cast<const Whole&>(
      __builtin_shufflevector(load_as<Whole>(&a), load_as<Whole>(&b), kFrom...)));
}
LONGHAUL_INLINE Floats to_floats(Words x) {
  return Floats::of([&](int p) { return __builtin_convertvector(x.part[p], Register); });
}
LONGHAUL_INLINE Words logical_shift_right(Words x, int bits) {
  using Unsigned = uint32_t __attribute__((vector_size(4 * kRegisterLanes)));
  return Words::of([&](int p) { return RegisterWords(Unsigned(x.part[p]) >> bits); });
}
LONGHAUL_INLINE Floats barrier(Floats x) {
  return Floats::of([&](int p) { return __builtin_assoc_barrier(x.part[p]); });
}
LONGHAUL_INLINE Floats fma(Floats a, Floats b, Floats c) {
  return Floats::of([&](int p) { return fma(a.part[p], b.part[p], c.part[p]); });
}
LONGHAUL_INLINE Floats max(Floats a, Floats b) {
  return Floats::of([&](int p) { return max(a.part[p], b.part[p]); });
}
LONGHAUL_INLINE Floats min(Floats a, Floats b) {
  return Floats::of([&](int p) { return min(a.part[p], b.part[p]); });
}
LONGHAUL_INLINE Mask to_mask(Words all_ones_where_true) {
  Mask m = 0;
#pragma GCC unroll 4
  for (int p = 0; p < kParts; ++p) {
    const RegisterWords part = all_ones_where_true.part[p];
#if defined(__AVX2__)
    m |= Mask(_mm256_movemask_ps(__m256(part))) << (p * kRegisterLanes);
#elif defined(__SSE__)
    m |= Mask(_mm_movemask_ps(__m128(part))) << (p * kRegisterLanes);
#else
    for (int i = 0; i < kRegisterLanes; ++i) m |= (part[i] ? 1U : 0U) << (p * kRegisterLanes + i);
#endif
  }
  return m;
}
LONGHAUL_INLINE Words to_lanes(Mask m) {
  constexpr int32_t kBits[] = {1,   2,   4,    8,    16,   32,   64,    128,
                               256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
  return (all_words(static_cast<int32_t>(m)) & load_words(kBits)) != 0;
}
LONGHAUL_INLINE Mask greater(Floats a, Floats b) { return to_mask(a > b); }
LONGHAUL_INLINE Mask not_at_most(Floats a, Floats b) { return 0xffff & ~to_mask(a <= b); }
LONGHAUL_INLINE Mask at_most(Words a, Words b) { return to_mask(a <= b); }
LONGHAUL_INLINE Floats select(Mask m, Floats a, Floats b) { return choose(to_lanes(m), a, b); }
template <typename E>
LONGHAUL_INLINE void compress(Mask m, Wide<E> v, E* to) {
#if defined(__AVX2__)
#pragma GCC unroll 2
  for (int p = 0; p < kParts; ++p) {
    const Mask of_part = m >> (p * kRegisterLanes) & 0xff;
    const __m256i order = _mm256_cvtepu8_epi32(
        _mm_loadl_epi64(reinterpret_cast<const __m128i*>(kCompressOrder.lanes[of_part])));
    store_as(to, _mm256_permutevar8x32_epi32(__m256i(v.part[p]), order));
    to += __builtin_popcount(of_part);
  }
#else
  E lanes[kLanes];
  std::memcpy(lanes, &v, sizeof lanes);
  for (; m; m &= m - 1) *to++ = lanes[__builtin_ctz(m)];
#endif
}
LONGHAUL_INLINE Floats exponent(Floats x) {
  return to_floats(((Words(x) >> 23) & 255) - 127) + (x - x);  // NaN stays NaN
}
LONGHAUL_INLINE Floats mantissa(Floats x) { return Floats((Words(x) & 0x807fffff) | 0x3f800000); }
// Of a vector's lanes two at a time by f, always in the same order.
template <typename F>
LONGHAUL_INLINE float reduce(Floats v, const F& f) {
  float lanes[kLanes];
  store(lanes, v);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] = f(lanes[i], lanes[i + half]);
  }
  return lanes[0];
}
LONGHAUL_INLINE float sum(Floats v) {
  return reduce(v, [](float a, float b) { return a + b; });
}
LONGHAUL_INLINE float largest(Floats v) {
  return reduce(v, [](float a, float b) { return b > a ? b : a; });
}

#endif

// x to bf16, nearest even, in the upper halves of the words.
LONGHAUL_INLINE Words rounded_bits(Floats x) {
  const Words bits = Words(x);
  return (bits + 0x7fff + ((bits >> 16) & 1)) | Words(x != x);  // NaN: all bits
}
// Sixteen bf16.
using Halves = int16_t __attribute__((vector_size(2 * kLanes)));
LONGHAUL_INLINE Halves to_bf16(Floats v) {
#if defined(__AVX512BF16__)
  return Halves(_mm512_cvtneps_pbh(v));
#elif defined(__AVX512F__)
  return Halves(_mm512_cvtepi32_epi16(__m512i(rounded_bits(v) >> 16)));
#else
  const Words bits = logical_shift_right(rounded_bits(v), 16);
#if defined(__AVX2__)
  const __m256i packed = _mm256_packus_epi32(__m256i(bits.part[0]), __m256i(bits.part[1]));
  return Halves(_mm256_permute4x64_epi64(packed, 0xD8));
#else
  using Part = int16_t __attribute__((vector_size(2 * kRegisterLanes)));
  Part parts[kParts];
  for (int p = 0; p < kParts; ++p) parts[p] = __builtin_convertvector(bits.part[p], Part);
  return load_as<Halves>(parts);
#endif
#endif
}
// Rounds two vectors to bf16, nearest even: the even halves of the words from `even`, the odd ones
// from `odd`.
LONGHAUL_INLINE Words pack_bf16(Floats even, Floats odd) {
#if defined(__AVX512BF16__)
  const __m512i interleave =
      _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                       21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return Words(_mm512_permutexvar_epi16(interleave, (__m512i)_mm512_cvtne2ps_pbh(odd, even)));
#else
  return logical_shift_right(rounded_bits(even), 16) | (rounded_bits(odd) & all_words(-65536));
#endif
}

// Sixteen elements as fp32, and back (rounded to nearest even).
LONGHAUL_INLINE Floats load_as_floats(const float* p) { return load(p); }
LONGHAUL_INLINE Floats load_as_floats(const bf16* p) {
#if defined(__AVX512F__)
  __m256i bits;
  std::memcpy(&bits, p, sizeof bits);
  return Floats(Words(_mm512_cvtepu16_epi32(bits)) << 16);
#else
  using Part = uint16_t __attribute__((vector_size(2 * kRegisterLanes)));
  return Floats::of([&](int part) {
    const auto bits = load_as<Part>(p + part * kRegisterLanes);
#if defined(__AVX2__)
    return Register(RegisterWords(_mm256_cvtepu16_epi32(__m128i(bits))) << 16);
#else
    return Register(__builtin_convertvector(bits, RegisterWords) << 16);
#endif
  });
#endif
}
LONGHAUL_INLINE void store_rounded(float* p, Floats v) { store(p, v); }
LONGHAUL_INLINE void store_rounded(bf16* p, Floats v) { store_as(p, to_bf16(v)); }

// v as it would come back from memory as T: rounded before anything else is done with it, so also
// no part of a fused multiply-add.
template <typename T>
LONGHAUL_INLINE Floats as_rounded(Floats v) {
  if constexpr (sizeof(T) == sizeof(float)) return barrier(v);
#if defined(__AVX512BF16__)
  return Floats(Words(_mm512_cvtepu16_epi32(__m256i(to_bf16(v)))) << 16);
#else
  return Floats(rounded_bits(v) & all_words(-65536));
#endif
}

// acc + the products of the elements that the words hold.
template <typename T>
LONGHAUL_INLINE Register dot(Register acc, RegisterWords a, RegisterWords b) {
  if constexpr (sizeof(T) == 4) {
    return fma(Register(a), Register(b), acc);
  } else {
#if defined(__AVX512BF16__)
    return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
#else
    const RegisterWords high = RegisterWords{} - 65536;
    acc = fma(Register(a << 16), Register(b << 16), acc);
    return fma(Register(a & high), Register(b & high), acc);
#endif
  }
}
#if !defined(__AVX512F__)
template <typename T>
LONGHAUL_INLINE Floats dot(Floats acc, Words a, Words b) {
  return Floats::of([&](int p) { return dot<T>(acc.part[p], a.part[p], b.part[p]); });
}
#endif

// The even lanes of a, then those of b; the odd ones.
#if defined(__AVX2__) && !defined(__AVX512F__)
template <int kOf4>
LONGHAUL_INLINE Floats every_second(Floats a, Floats b) {
  const auto of_two = [](__m256 x, __m256 y) {
    const __m256d halves = __m256d(_mm256_shuffle_ps(x, y, kOf4));
    return Register(_mm256_permute4x64_pd(halves, 0xD8));
  };
  return Floats::of(
      [&](int p) { return p == 0 ? of_two(a.part[0], a.part[1]) : of_two(b.part[0], b.part[1]); });
}
LONGHAUL_INLINE Floats even_lanes(Floats a, Floats b) { return every_second<0x88>(a, b); }
LONGHAUL_INLINE Floats odd_lanes(Floats a, Floats b) { return every_second<0xDD>(a, b); }
#else
LONGHAUL_INLINE Floats even_lanes(Floats a, Floats b) {
  return shuffle<0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30>(a, b);
}
LONGHAUL_INLINE Floats odd_lanes(Floats a, Floats b) {
  return shuffle<1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31>(a, b);
}
#endif
// The lanes of a and b in turn: those of the first halves, then those of the second ones.
LONGHAUL_INLINE void zip_lanes(Floats a, Floats b, Floats (&turns)[2]) {
#if defined(__AVX2__) && !defined(__AVX512F__)
#pragma GCC unroll 2
  for (int p = 0; p < kParts; ++p) {
    // Four lanes of each half of a register.
    const __m256 low = _mm256_unpacklo_ps(a.part[p], b.part[p]);
    const __m256 high = _mm256_unpackhi_ps(a.part[p], b.part[p]);
    turns[p].part[0] = Register(_mm256_permute2f128_ps(low, high, 0x20));
    turns[p].part[1] = Register(_mm256_permute2f128_ps(low, high, 0x31));
  }
#else
  turns[0] = shuffle<0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23>(a, b);
  turns[1] = shuffle<8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31>(a, b);
#endif
}
// The even lanes, then the odd ones.
LONGHAUL_INLINE Floats evens_first(Floats x) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  Floats r;
  r.part[0] = even_lanes(x, x).part[0];
  r.part[1] = odd_lanes(x, x).part[0];
  return r;
#else
  return shuffle<0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15>(x, x);
#endif
}
// Neighbours in each other's place.
LONGHAUL_INLINE Floats swap_pairs(Floats x) {
#if defined(__AVX512F__)
  return _mm512_permute_ps(x, 0xB1);
#elif defined(__AVX2__)
  return Floats::of([&](int p) { return Register(_mm256_permute_ps(x.part[p], 0xB1)); });
#else
  return shuffle<1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14>(x, x);
#endif
}

constexpr float kLog2E = 1.4426950408889634F, kLn2 = 0.6931471805599453F;

// 2^x to 2e-7 relative. It is 0 below -150, or without AVX-512 what is no normal number may be: 0
// below -126, infinite from 127.5 on.
LONGHAUL_INLINE Floats exp2(Floats x) {
#if defined(__AVX512F__)
  x = max(all(-150.0F), x);
  const Floats n = _mm512_roundscale_ps(x, 8);
#else
  // The sum is rounded to a whole number, whose last bits are n + 127: the exponent of 2^n. That of
  // 2^-127 stands for 0, that of 2^128 for infinity.
  x = min(all(128.0F), max(all(-127.0F), x));
  const Floats magic = all(1.5F * (1 << 23) + 127), sum = x + magic, n = sum - magic;
#endif
  // By powers of f * f, which waits less often than by powers of f.
  const Floats f = x - n, f2 = f * f;
  Floats p = fma(all(1.3333558e-3F), f, all(9.6181291e-3F));
  p = fma(all(1.5403530e-4F), f2, p);
  p = fma(p, f2, fma(all(5.5504109e-2F), f, all(2.4022651e-1F)));
  p = fma(p, f2, fma(all(6.9314718e-1F), f, all(1.0F)));
#if defined(__AVX512F__)
  return _mm512_scalef_ps(p, n);
#else
  return p * Floats(Words(sum) << 23);
#endif
}

// log2(x) of a normal x > 0.
LONGHAUL_INLINE Floats log2(Floats x) {
  Floats e = exponent(x), m = mantissa(x);
  const Mask large = greater(m, all(1.41421356F));
  m = select(large, m * 0.5F, m);
  e = select(large, e + 1.0F, e);
  const Floats t = (m - 1.0F) / (m + 1.0F), t2 = t * t;
  Floats p = all(2.0F / 9 * kLog2E);
  p = fma(p, t2, all(2.0F / 7 * kLog2E));
  p = fma(p, t2, all(2.0F / 5 * kLog2E));
  p = fma(p, t2, all(2.0F / 3 * kLog2E));
  p = fma(p, t2, all(2.0F * kLog2E));
  return fma(p, t, e);
}

// Lane i of the result is the sum over the lanes of v[i].
LONGHAUL_INLINE Floats sums_of_lanes(const Floats (&v)[kLanes]) {
#if defined(__AVX512F__)
  __m512 x[8], y[4], z[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    x[i] = _mm512_shuffle_f32x4(v[i], v[i + 8], 0x44) + _mm512_shuffle_f32x4(v[i], v[i + 8], 0xEE);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    y[i] = _mm512_shuffle_f32x4(x[i], x[i + 4], 0x88) + _mm512_shuffle_f32x4(x[i], x[i + 4], 0xDD);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    z[i] = _mm512_shuffle_ps(y[i], y[i + 2], 0x44) + _mm512_shuffle_ps(y[i], y[i + 2], 0xEE);
  }
  const __m512 r = _mm512_shuffle_ps(z[0], z[1], 0x88) + _mm512_shuffle_ps(z[0], z[1], 0xDD);
  // Quarter q, lane e of r belongs to v[{0, 8, 4, 12}[q] + {0, 2, 1, 3}[e]].
  return _mm512_permutexvar_ps(
      _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15), r);
#elif defined(__AVX2__)
  return Floats::of([&](int p) {
    // Four lanes of each half belong to four vectors after two rounds, those of two such fours
    // after the third.
    __m256 fours[2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      __m256 x[4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const Floats& of = v[8 * p + 4 * i + j];
        x[j] = of.part[0] + of.part[1];
      }
      fours[i] = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
    }
    return Register(_mm256_permute2f128_ps(fours[0], fours[1], 0x20) +
                    _mm256_permute2f128_ps(fours[0], fours[1], 0x31));
  });
#else
  float sums[kLanes];
  for (int i = 0; i < kLanes; ++i) sums[i] = sum(v[i]);
  return load(sums);
#endif
}

// Denormals count as zero from here on in this thread: vdpbf16ps flushes them anyway, so that every
// step sees the same numbers. The state of the thread before is put back at the end.
class FlushDenormals {
 public:
#if defined(__SSE__)
  FlushDenormals() : before_(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(before_ | 0x8040); }
  ~FlushDenormals() { __builtin_ia32_ldmxcsr(before_); }

 private:
  unsigned before_;
#endif
};

}  // namespace longhaul::cpu::LONGHAUL_ISA
