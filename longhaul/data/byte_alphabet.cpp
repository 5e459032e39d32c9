#include "longhaul/data/byte_alphabet.h"

#include <algorithm>
#include <numeric>

#include "longhaul/data/utf8.h"

namespace longhaul::data {
namespace {

constexpr char32_t kFirstStandIn = 0x100;
constexpr size_t kNumStandIns = 68;

constexpr bool stands_for_itself(int byte) {
  return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
}

struct Tables {
  std::array<char32_t, 256> character{};
  std::array<int16_t, kFirstStandIn + kNumStandIns> byte{};

  constexpr Tables() {
    byte.fill(-1);
    char32_t next = kFirstStandIn;
    for (int b = 0; b < 256; ++b) {
      character[b] = stands_for_itself(b) ? static_cast<char32_t>(b) : next++;
      byte[character[b]] = static_cast<int16_t>(b);
    }
  }
};

constexpr Tables kTables;

}  // namespace

std::string to_byte_alphabet(std::string_view bytes) {
  std::string spelled;
  for (const char byte : bytes) append_utf8(spelled, kTables.character[static_cast<uint8_t>(byte)]);
  return spelled;
}

std::optional<std::string> from_byte_alphabet(std::string_view spelled) {
  std::string bytes;
  for (size_t at = 0; at < spelled.size();) {
    const CodePoint c = code_point_at(spelled, at);
    if (c.value >= kTables.byte.size() || kTables.byte[c.value] < 0) return std::nullopt;
    bytes.push_back(static_cast<char>(kTables.byte[c.value]));
    at += c.length;
  }
  return bytes;
}

std::array<uint8_t, 256> bytes_in_alphabet_order() {
  std::array<uint8_t, 256> bytes;
  std::iota(bytes.begin(), bytes.end(), uint8_t{0});
  std::sort(bytes.begin(), bytes.end(),
            [](uint8_t a, uint8_t b) { return kTables.character[a] < kTables.character[b]; });
  return bytes;
}

}  // namespace longhaul::data
