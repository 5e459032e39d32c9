#include "longhaul/base/rng.h"

#include <xxhash.h>

#include <cmath>
#include <numbers>

namespace longhaul {
namespace {

constexpr uint32_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
constexpr uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;
constexpr int kRounds = 10;

double to_unit(uint32_t high, uint32_t low) {
  const uint64_t bits = (static_cast<uint64_t>(high) << 32 | low) >> 11;
  return static_cast<double>(bits) * 0x1.0p-53;
}

}  // namespace

std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> c, std::array<uint32_t, 2> k) {
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t p0 = static_cast<uint64_t>(kMultiplier0) * c[0];
    const uint64_t p1 = static_cast<uint64_t>(kMultiplier1) * c[2];
    c = {static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k[0], static_cast<uint32_t>(p1),
         static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k[1], static_cast<uint32_t>(p0)};
    k = {k[0] + kWeyl0, k[1] + kWeyl1};
  }
  return c;
}

CounterRng::CounterRng(uint64_t seed, std::string_view name) {
  const uint64_t stream = stable_hash(name);
  key_ = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  stream_ = {static_cast<uint32_t>(stream), static_cast<uint32_t>(stream >> 32)};
}

std::array<uint32_t, 4> CounterRng::block(uint64_t index) const {
  return philox4x32(
      {static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32), stream_[0], stream_[1]},
      key_);
}

double CounterRng::normal(uint64_t index) const {
  const auto words = block(index);
  const double u = 1.0 - to_unit(words[0], words[1]);  // in (0, 1], so that the logarithm exists
  const double v = to_unit(words[2], words[3]);
  return std::sqrt(-2.0 * std::log(u)) * std::cos(2.0 * std::numbers::pi * v);
}

double CounterRng::uniform(uint64_t index) const {
  const auto words = block(index);
  return to_unit(words[0], words[1]);
}

uint64_t CounterRng::bits(uint64_t index) const {
  const auto words = block(index);
  return static_cast<uint64_t>(words[0]) << 32 | words[1];
}

uint64_t stable_hash(std::string_view text) { return XXH3_64bits(text.data(), text.size()); }

}  // namespace longhaul
