// Rotation of pairs: every element is read once, where it lies, and written once.
#include "include/longhaul/kernels.h"
#include "longhaul/ops/cpu/kernel_table.h"
#include "longhaul/ops/cpu/rows.h"

namespace longhaul::cpu::LONGHAUL_ISA {
namespace {

using Args = longhaul_rotary_mul_args;

// The angles of a token; `sign` is that of the direction.
struct Angles {
  const float *cos, *sin;
  float sign;
};

// The pairs (a, b) turned by the angles from i on.
template <typename P>
LONGHAUL_INLINE Results<2> turned(Floats a, Floats b, const Angles& angles, int64_t i, P part) {
  const Floats cos = load_as_floats(angles.cos + i, part);
  const Floats sin = load_as_floats(angles.sin + i, part) * angles.sign;
  return {{a * cos - b * sin, b * cos + a * sin}};
}

template <bool kStream, typename T>
LONGHAUL_INLINE void turn_halves(const T* x, int64_t half, const Angles& angles, T* out) {
  T* const halves[] = {out, out + half};
  write_rows<kStream>(halves, half, [&](int64_t i, auto part) LONGHAUL_INLINED {
    return turned(load_as_floats(x + i, part), load_as_floats(x + half + i, part), angles, i, part);
  });
}

LONGHAUL_INLINE void load_pairs(const bf16* x, Floats& a, Floats& b) {
  const Words pairs = load_words(x);
  a = Floats(pairs << 16);
  b = Floats(pairs & all_words(-65536));
}
LONGHAUL_INLINE void load_pairs(const float* x, Floats& a, Floats& b) {
  a = even_lanes(load(x), load(x + kLanes));
  b = odd_lanes(load(x), load(x + kLanes));
}

LONGHAUL_INLINE void put_pairs(bf16* out, const Results<2>& pairs) {
  store_words(out, pack_bf16(pairs.of[0], pairs.of[1]));
}
LONGHAUL_INLINE void put_pairs(float* out, const Results<2>& pairs) {
  Floats turns[2];
  zip_lanes(pairs.of[0], pairs.of[1], turns);
  for (int i = 0; i < 2; ++i) store(out + i * kLanes, turns[i]);
}

template <bool kStream, typename T>
LONGHAUL_INLINE void turn_interleaved(const T* x, int64_t half, const Angles& angles, T* out) {
  Floats a, b;
  const auto turn = [&](int64_t i, T* to) LONGHAUL_INLINED {
    load_pairs(x + 2 * i, a, b);
    put_pairs(to, turned(a, b, angles, i, Whole{}));
  };
  int64_t i = 0;
  if constexpr (kStream) {
    i = stream_rows<1>({out}, 2 * half,
                       [&](int64_t from, int64_t n, auto& block) LONGHAUL_INLINED {
                         for (int64_t j = 0; j < n; j += 2 * kLanes)
                           turn((from + j) / 2, block[0] + j);
                       }) /
        2;
  }
  for (; i + kLanes <= half; i += kLanes) turn(i, out + 2 * i);
  if (i == half) return;
  T pairs[2 * kLanes] = {};
  const auto bytes = static_cast<size_t>(2 * (half - i)) * sizeof(T);
  std::memcpy(pairs, x + 2 * i, bytes);
  load_pairs(pairs, a, b);
  put_pairs(pairs, turned(a, b, angles, i, Part{half - i}));
  std::memcpy(out + 2 * i, pairs, bytes);
}

template <typename T, bool kStream>
void turn_token(const Args& a, int64_t token) {
  const int64_t half = a.R / 2;
  const Angles angles = {a.cos + token * half, a.sin + token * half, a.backward ? -1.0F : 1.0F};
  for (int64_t h = 0; h < a.H; ++h) {
    const T* x = static_cast<const T*>(a.x) + token * a.token_stride + h * a.head_stride;
    T* out = static_cast<T*>(a.out) + (token * a.H + h) * a.R;
    a.interleaved ? turn_interleaved<kStream>(x, half, angles, out)
                  : turn_halves<kStream>(x, half, angles, out);
  }
}

// Half a row is what is streamed at a time.
bool streams(const Args& a) {
  const int64_t half_bytes = a.R / 2 * bytes_of(a.dtype);
  return is_streamed(a.out, a.T * a.H * 2 * half_bytes, half_bytes);
}

}  // namespace

void rotary_mul(const Args& a) {
  with_type(a.dtype, streams(a), [&]<typename T, bool kStream>() {
    in_parallel<kStream>(a.T, a.H * a.R, [&](int64_t token) { turn_token<T, kStream>(a, token); });
  });
}

}  // namespace longhaul::cpu::LONGHAUL_ISA
