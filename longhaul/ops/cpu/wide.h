// Sixteen lanes for processors whose registers are narrower: as many registers as that takes, with
// the operators of GCC's vectors. A vector of GCC's own of that size would lie in memory. Nothing
// but simd.h includes it.
#pragma once

#include <cstdint>
#include <cstring>

#include "longhaul/ops/cpu/register.h"

namespace longhaul::cpu::LONGHAUL_ISA {

template <typename E>
struct RegisterOf;
template <>
struct RegisterOf<float> {
  using type = Register;
};
template <>
struct RegisterOf<int32_t> {
  using type = RegisterWords;
};

template <typename E>
class Wide {
 public:
  using Part = typename RegisterOf<E>::type;

  Wide() = default;
  LONGHAUL_INLINE Wide(E x) {  // NOLINT: as GCC's vectors take a number in an operation
    for (Part& p : part) p = Part{} + x;
  }
  // The same bits.
  template <typename F>
  LONGHAUL_INLINE explicit Wide(const Wide<F>& x) {
    for (int p = 0; p < kParts; ++p) part[p] = Part(x.part[p]);
  }
  LONGHAUL_INLINE E operator[](int lane) const {
    E lanes[kLanes];
    std::memcpy(lanes, part, sizeof lanes);
    return lanes[lane];
  }

  // A vector of what op gives for each number of a part.
  template <typename Op>
  static LONGHAUL_INLINE Wide of(const Op& op) {
    Wide r;
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) r.part[p] = op(p);
    return r;
  }

  friend LONGHAUL_INLINE Wide operator+(const Wide& a, const Wide& b) {
    return of([&](int p) { return a.part[p] + b.part[p]; });
  }
  friend LONGHAUL_INLINE Wide operator-(const Wide& a, const Wide& b) {
    return of([&](int p) { return a.part[p] - b.part[p]; });
  }
  friend LONGHAUL_INLINE Wide operator-(const Wide& a) {
    return of([&](int p) { return -a.part[p]; });
  }
  friend LONGHAUL_INLINE Wide operator*(const Wide& a, const Wide& b) {
    return of([&](int p) { return a.part[p] * b.part[p]; });
  }
  friend LONGHAUL_INLINE Wide operator/(const Wide& a, const Wide& b) {
    return of([&](int p) { return a.part[p] / b.part[p]; });
  }
  friend LONGHAUL_INLINE Wide operator&(const Wide& a, const Wide& b) {
    return of([&](int p) { return a.part[p] & b.part[p]; });
  }
  friend LONGHAUL_INLINE Wide operator|(const Wide& a, const Wide& b) {
    return of([&](int p) { return a.part[p] | b.part[p]; });
  }
  friend LONGHAUL_INLINE Wide operator^(const Wide& a, const Wide& b) {
    return of([&](int p) { return a.part[p] ^ b.part[p]; });
  }
  friend LONGHAUL_INLINE Wide operator<<(const Wide& a, int bits) {
    return of([&](int p) { return a.part[p] << bits; });
  }
  friend LONGHAUL_INLINE Wide operator>>(const Wide& a, int bits) {
    return of([&](int p) { return a.part[p] >> bits; });
  }
  friend LONGHAUL_INLINE Wide<int32_t> operator!=(const Wide& a, const Wide& b) {
    return Wide<int32_t>::of([&](int p) { return a.part[p] != b.part[p]; });
  }
  friend LONGHAUL_INLINE Wide<int32_t> operator>(const Wide& a, const Wide& b) {
    return Wide<int32_t>::of([&](int p) { return a.part[p] > b.part[p]; });
  }
  friend LONGHAUL_INLINE Wide<int32_t> operator<=(const Wide& a, const Wide& b) {
    return Wide<int32_t>::of([&](int p) { return a.part[p] <= b.part[p]; });
  }
  LONGHAUL_INLINE Wide& operator+=(const Wide& b) { return *this = *this + b; }
  LONGHAUL_INLINE Wide& operator*=(const Wide& b) { return *this = *this * b; }

  Part part[kParts];
};

// For each mask of eight lanes the numbers of those that are set.
struct CompressOrder {
  uint8_t lanes[256][8] = {};
  constexpr CompressOrder() {
    for (int mask = 0; mask < 256; ++mask) {
      uint8_t* to = lanes[mask];
      for (int lane = 0; lane < 8; ++lane) {
        if (mask >> lane & 1) *to++ = static_cast<uint8_t>(lane);
      }
    }
  }
};
inline constexpr CompressOrder kCompressOrder;

}  // namespace longhaul::cpu::LONGHAUL_ISA
