// What Clang 14 lacks of GCC 12, whose vectors the CPU kernels are written in. The preset `fuzz`
// includes it before every source (-include), so that the kernels need not know of Clang.
#pragma once

// Clang tells it by __has_feature(address_sanitizer) instead; longhaul/ops/cpu/workspace.h asks for
// it.
#define __SANITIZE_ADDRESS__ 1

// Lane i is lane places[i] of the lanes of a and b, one after the other.
template <typename Vector, typename Places>
inline __attribute__((always_inline)) Vector __builtin_shuffle(Vector a, Vector b, Places places) {
  constexpr int kLanes = sizeof(Vector) / sizeof(a[0]);
  Vector shuffled = {};
  for (int i = 0; i < kLanes; ++i) {
    const int place = static_cast<int>(places[i]) & (2 * kLanes - 1);
    shuffled[i] = place < kLanes ? a[place] : b[place - kLanes];
  }
  return shuffled;
}
template <typename Vector, typename Places>
inline __attribute__((always_inline)) Vector __builtin_shuffle(Vector a, Places places) {
  return __builtin_shuffle(a, a, places);
}

// Keeps GCC from merging operations across it, which Clang does not do without -ffast-math.
template <typename Vector>
inline __attribute__((always_inline)) Vector __builtin_assoc_barrier(Vector v) {
  return v;
}
