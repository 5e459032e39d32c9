// The characters of UTF-8 text, and whether a large text is UTF-8; base/utf8.h says where it is
// not. The tokenizer and the corpora call it.
#pragma once

#include <string>
#include <string_view>

namespace longhaul::data {

// Some editors put it in front of a text.
inline constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";

// Many times as fast as a search for the first ill-formed part.
bool is_valid_utf8(std::string_view text);

// The code point at text[at] and its length in bytes; `text` must be valid UTF-8.
struct CodePoint {
  char32_t value;
  size_t length;
};
CodePoint code_point_at(std::string_view text, size_t at);

// Where the character before text[at] begins, for at > 0; `text` must be valid UTF-8.
size_t begin_of_character_before(std::string_view text, size_t at);

// Appends the UTF-8 form of `value`.
void append_utf8(std::string& out, char32_t value);

}  // namespace longhaul::data
