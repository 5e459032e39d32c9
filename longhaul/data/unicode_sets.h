// Sets of characters as members of a regular expression's set: what \s, \w and \p{...} mean to
// Oniguruma 6.9.10 (Unicode 16), in words that both PCRE2 10.42 (Unicode 14) and ICU understand.
// Called by the translation of patterns.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace longhaul::data {

std::string_view space_members();
// The same for everything but white space.
std::string_view other_than_space_members();
std::string word_members();
// Oniguruma's \w, which counts the superscript digits and fractions of Latin-1 in and joiners out.
std::string ruby_word_members();
// What splits off as punctuation: ASCII's, and Unicode 8's categories P.
std::string_view punctuation_members();
// What counts as a digit to the pre-tokenizer Digits: Unicode 17's categories N.
std::string digit_members();

// \p{name}: a general category by its short name (L, Lu) or a script; nullopt if it is neither or
// not known here.
std::optional<std::string> property_members(std::string_view name);

}  // namespace longhaul::data
