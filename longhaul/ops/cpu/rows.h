// The building blocks of kernels that only move memory: passes over a row of any width, and results
// that are written past the caches.
#pragma once

#include "include/longhaul/kernels.h"
#include "longhaul/ops/cpu/simd.h"

namespace longhaul::cpu::LONGHAUL_ISA {

// How many elements of a vector there are: all, or the first few of the last one of a row.
struct Whole {};
struct Part {
  int64_t count;
};

template <typename T>
LONGHAUL_INLINE Floats load_as_floats(const T* p, Whole) {
  return load_as_floats(p);
}
// Zeros behind the part.
template <typename T>
LONGHAUL_INLINE Floats load_as_floats(const T* p, Part part) {
  T lanes[kLanes] = {};
  std::memcpy(lanes, p, static_cast<size_t>(part.count) * sizeof(T));
  return load_as_floats(lanes);
}

// Calls f(i, part) for every 16 elements from i on.
template <typename F>
LONGHAUL_INLINE void for_lanes(int64_t n, const F& f) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) f(i, Whole{});
  if (i < n) f(i, Part{n - i});
}

// The sum of term(i, part), which gives 16 terms at a time. Four sums side by side, since one would
// wait for itself.
template <typename F>
LONGHAUL_INLINE float sum_over(int64_t n, const F& term) {
  constexpr int kSums = 4;
  Floats sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums * kLanes <= n; i += kSums * kLanes) {
#pragma GCC unroll 4
    for (int j = 0; j < kSums; ++j) sums[j] += term(i + j * kLanes, Whole{});
  }
  for (; i + kLanes <= n; i += kLanes) sums[0] += term(i, Whole{});
  if (i < n) sums[1] += term(i, Part{n - i});
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// Writes a line of 64 bytes past the caches, and spares the read of what it overwrites. `p` is
// aligned to it. Other threads may see it late: drain_streams() first. A line goes in as few stores
// as there can be: a processor that finds other work between them may send it off in pieces.
LONGHAUL_INLINE void stream_line(void* p, Words line) {
#if defined(__AVX512F__)
  _mm512_stream_si512(static_cast<__m512i*>(p), __m512i(line));
#elif defined(__AVX2__)
  for (int i = 0; i < kParts; ++i) {
    _mm256_stream_si256(static_cast<__m256i*>(p) + i, __m256i(line.part[i]));
  }
#elif defined(__SSE__)
  __m128i quarters[4];
  std::memcpy(quarters, &line, sizeof line);
  for (int i = 0; i < 4; ++i) _mm_stream_si128(static_cast<__m128i*>(p) + i, quarters[i]);
#else
  store_words(p, line);
#endif
}

// Elements of a row that are made in the first cache before they are streamed.
template <typename T>
constexpr int64_t kStreamBlock = 1024 / sizeof(T);

// Streams the whole lines of n elements of each of N rows and returns how many elements these are:
// make(i, count, block) makes those from i on. A block at a time, since a read whose place in its
// page is that of a line streamed just before would wait until that line is on its way.
template <int N, typename T, typename F>
LONGHAUL_INLINE int64_t stream_rows(T* const (&rows)[N], int64_t n, const F& make) {
  constexpr int64_t kLine = sizeof(Words) / sizeof(T);
  alignas(64) T block[N][kStreamBlock<T>];
  const int64_t whole = n / kLine * kLine;
  for (int64_t i = 0; i < whole; i += kStreamBlock<T>) {
    const int64_t count = whole - i < kStreamBlock<T> ? whole - i : kStreamBlock<T>;
    make(i, count, block);
    for (int row = 0; row < N; ++row) {
      for (int64_t j = 0; j < count; j += kLine) {
        stream_line(rows[row] + i + j, load_words(block[row] + j));
      }
    }
  }
  return whole;
}
LONGHAUL_INLINE void drain_streams() {
#if defined(__SSE__)
  _mm_sfence();
#endif
}

template <typename T>
LONGHAUL_INLINE void put(T* p, Floats v, Whole) {
  store_rounded(p, v);
}
template <typename T>
LONGHAUL_INLINE void put(T* p, Floats v, Part part) {
  T lanes[kLanes];
  store_rounded(lanes, v);
  std::memcpy(p, lanes, static_cast<size_t>(part.count) * sizeof(T));
}

// Sixteen elements of each of N rows.
template <int N>
struct Results {
  Floats of[N];
};

// Writes n elements of each of N rows, rounded to their dtype: values(i, part) gives those from i
// on. Streamed rows start at a line.
template <bool kStream, int N, typename T, typename F>
LONGHAUL_INLINE void write_rows(T* const (&rows)[N], int64_t n, const F& values) {
  int64_t i = 0;
  if constexpr (kStream) {
    i = stream_rows(rows, n, [&](int64_t from, int64_t count, auto& block) LONGHAUL_INLINED {
      for (int64_t j = 0; j < count; j += kLanes) {
        const Results<N> results = values(from + j, Whole{});
#pragma GCC unroll 2
        for (int row = 0; row < N; ++row) store_rounded(block[row] + j, results.of[row]);
      }
    });
  }
  for_lanes(n - i, [&](int64_t rest, auto part) LONGHAUL_INLINED {
    const Results<N> results = values(i + rest, part);
#pragma GCC unroll 2
    for (int row = 0; row < N; ++row) put(rows[row] + i + rest, results.of[row], part);
  });
}
template <bool kStream, typename T, typename F>
LONGHAUL_INLINE void write_row(T* row, int64_t n, const F& values) {
  write_rows<kStream, 1>(
      {row}, n, [&](int64_t i, auto part) LONGHAUL_INLINED { return Results<1>{values(i, part)}; });
}

inline int64_t bytes_of(longhaul_dtype dtype) { return dtype == LONGHAUL_FLOAT32 ? 4 : 2; }

// Whether results should be streamed: where they are too large for what reads them next to find
// them in the caches, and start at a line, row by row.
inline bool is_streamed(const void* results, int64_t bytes, int64_t row_bytes) {
  constexpr int64_t kLine = 64, kLargerThanCaches = int64_t{16} << 20;
  return bytes >= kLargerThanCaches && row_bytes % kLine == 0 &&
         reinterpret_cast<uintptr_t>(results) % kLine == 0;
}

// Calls f<T, kStream>().
template <typename F>
void with_type(longhaul_dtype dtype, bool streamed, const F& f) {
  if (dtype == LONGHAUL_FLOAT32) {
    streamed ? f.template operator()<float, true>() : f.template operator()<float, false>();
  } else {
    streamed ? f.template operator()<bf16, true>() : f.template operator()<bf16, false>();
  }
}

// Waking another thread takes longer than this many elements.
constexpr int64_t kWorthAThread = 32768;

// f(i) for i < n, on all threads; each takes a run of them. An i stands for `elements` elements.
template <bool kStream, typename F>
void in_parallel(int64_t n, int64_t elements, const F& f) {
#pragma omp parallel if (n * elements > kWorthAThread)
  {
#pragma omp for schedule(static) nowait
    for (int64_t i = 0; i < n; ++i) f(i);
    if constexpr (kStream) drain_streams();
  }
}

}  // namespace longhaul::cpu::LONGHAUL_ISA
