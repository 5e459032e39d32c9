// One loop over the elements of many arrays of any sizes: all threads share it evenly, and waking
// them costs once.
#pragma once

#include <cstdint>

namespace longhaul::cpu::LONGHAUL_ISA {

// Elements that are taken at a time; never of two arrays.
constexpr int64_t kPiece = 16384;

inline int64_t pieces_of(int64_t n) { return (n + kPiece - 1) / kPiece; }

// Of all arrays; size(i) gives the elements of the i-th of `count`.
template <typename Size>
int64_t count_pieces(int64_t count, const Size& size) {
  int64_t pieces = 0;
  for (int64_t i = 0; i < count; ++i) pieces += pieces_of(size(i));
  return pieces;
}

// f(array, from, n, piece) for every piece, on all threads; pieces are numbered in order.
template <typename Size, typename F>
void in_pieces(int64_t count, const Size& size, const F& f) {
  const int64_t pieces = count_pieces(count, size);
#pragma omp parallel if (pieces > 2)
  {
    int64_t array = 0, first = 0;  // of a piece; they only grow, since a thread's pieces do
#pragma omp for schedule(static) nowait
    for (int64_t piece = 0; piece < pieces; ++piece) {
      while (piece - first >= pieces_of(size(array))) first += pieces_of(size(array++));
      const int64_t from = (piece - first) * kPiece, left = size(array) - from;
      f(array, from, left < kPiece ? left : kPiece, piece);
    }
  }
}

}  // namespace longhaul::cpu::LONGHAUL_ISA
