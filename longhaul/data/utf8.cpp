#include "longhaul/data/utf8.h"

#include <simdjson.h>

#include <cstdint>

namespace longhaul::data {

bool is_valid_utf8(std::string_view text) {
  return simdjson::validate_utf8(text.data(), text.size());
}

CodePoint code_point_at(std::string_view text, size_t at) {
  const auto byte = [&](size_t i) { return static_cast<char32_t>(static_cast<uint8_t>(text[i])); };
  const char32_t first = byte(at);
  if (first < 0x80) return {first, 1};
  if (first < 0xE0) return {(first & 0x1F) << 6 | (byte(at + 1) & 0x3F), 2};
  const char32_t second = byte(at + 1) & 0x3F, third = byte(at + 2) & 0x3F;
  if (first < 0xF0) return {(first & 0x0F) << 12 | second << 6 | third, 3};
  return {(first & 0x07) << 18 | second << 12 | third << 6 | (byte(at + 3) & 0x3F), 4};
}

size_t begin_of_character_before(std::string_view text, size_t at) {
  do {
    --at;
  } while (at > 0 && (static_cast<uint8_t>(text[at]) & 0xC0) == 0x80);
  return at;
}

void append_utf8(std::string& out, char32_t value) {
  const auto put = [&](char32_t byte) { out.push_back(static_cast<char>(byte)); };
  if (value < 0x80) {
    put(value);
  } else if (value < 0x800) {
    put(0xC0 | value >> 6);
    put(0x80 | (value & 0x3F));
  } else if (value < 0x10000) {
    put(0xE0 | value >> 12);
    put(0x80 | (value >> 6 & 0x3F));
    put(0x80 | (value & 0x3F));
  } else {
    put(0xF0 | value >> 18);
    put(0x80 | (value >> 12 & 0x3F));
    put(0x80 | (value >> 6 & 0x3F));
    put(0x80 | (value & 0x3F));
  }
}

}  // namespace longhaul::data
