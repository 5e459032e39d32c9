// UTF-8 of text that comes from disk. Broken input is repaired, never refused: each maximal
// ill-formed part becomes one U+FFFD, as Python's errors="replace" and the Unicode standard have it
// (chapter 3, "U+FFFD substitution of maximal subparts"). The tokenizer and the corpora call it.
#pragma once

#include <string>
#include <string_view>

namespace longhaul::data {

// Some editors put it in front of a text.
inline constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";

bool is_valid_utf8(std::string_view text);

// Where the first ill-formed part begins; npos if there is none.
size_t first_invalid_utf8(std::string_view text);

// `text` with every ill-formed part replaced by U+FFFD.
std::string repair_utf8(std::string_view text);

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
