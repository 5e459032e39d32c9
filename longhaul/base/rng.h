// Counter-based random numbers (Philox4x32-10; Salmon et al., "Parallel random numbers: as easy as
// 1, 2, 3", SC 2011). A number depends on (seed, name, index) and on nothing else, so any shard of
// a tensor can be filled alone and gives the same values as the whole.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace longhaul {

// Philox4x32-10 of one counter under one key.
std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key);

// An endless, randomly accessible stream of numbers that belongs to (seed, name).
class CounterRng {
 public:
  CounterRng(uint64_t seed, std::string_view name);

  // The index-th standard normal: Box-Muller in fp64 over two 53-bit uniforms.
  double normal(uint64_t index) const;
  // The index-th uniform number in [0, 1), 53 bits.
  double uniform(uint64_t index) const;
  // The index-th 64-bit word.
  uint64_t bits(uint64_t index) const;

 private:
  std::array<uint32_t, 4> block(uint64_t index) const;

  std::array<uint32_t, 2> key_;
  std::array<uint32_t, 2> stream_;
};

// A 64-bit hash of a string that never changes (XXH3).
uint64_t stable_hash(std::string_view text);

}  // namespace longhaul
