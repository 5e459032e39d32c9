#include "longhaul/base/utf8.h"

#include <cstdint>

namespace longhaul {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

// What may follow a lead byte: the number of continuation bytes and the range of the first of them
// (table 3-7 of the standard; the narrow ranges exclude overlong forms and surrogates).
struct Lead {
  int continuations = -1;
  uint8_t low = 0x80, high = 0xBF;
};

Lead classify(uint8_t byte) {
  if (byte < 0x80) return {0};
  if (byte >= 0xC2 && byte <= 0xDF) return {1};
  if (byte == 0xE0) return {2, 0xA0, 0xBF};
  if (byte == 0xED) return {2, 0x80, 0x9F};
  if (byte >= 0xE1 && byte <= 0xEF) return {2};
  if (byte == 0xF0) return {3, 0x90, 0xBF};
  if (byte >= 0xF1 && byte <= 0xF3) return {3};
  if (byte == 0xF4) return {3, 0x80, 0x8F};
  return {};
}

struct Sequence {
  size_t length;  // of the character, or of the maximal ill-formed part
  bool valid;
};

Sequence sequence_at(std::string_view text, size_t at) {
  const Lead lead = classify(static_cast<uint8_t>(text[at]));
  if (lead.continuations < 0) return {1, false};
  uint8_t low = lead.low, high = lead.high;
  for (int i = 1; i <= lead.continuations; ++i) {
    const size_t next = at + static_cast<size_t>(i);
    const auto byte = next < text.size() ? static_cast<uint8_t>(text[next]) : uint8_t{0};
    if (byte < low || byte > high) return {static_cast<size_t>(i), false};
    low = 0x80;
    high = 0xBF;
  }
  return {static_cast<size_t>(lead.continuations) + 1, true};
}

}  // namespace

size_t first_invalid_utf8(std::string_view text) {
  for (size_t at = 0; at < text.size();) {
    const Sequence sequence = sequence_at(text, at);
    if (!sequence.valid) return at;
    at += sequence.length;
  }
  return std::string_view::npos;
}

std::string repair_utf8(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t at = 0; at < text.size();) {
    const Sequence sequence = sequence_at(text, at);
    out += sequence.valid ? text.substr(at, sequence.length) : kReplacement;
    at += sequence.length;
  }
  return out;
}

}  // namespace longhaul
