// What single characters are, and the normal forms of text, by the versions of Unicode that Hugging
// Face's tokenizers go by: White_Space has not changed since version 6.3, words and small letters
// follow version 16 and 17, normal forms know the characters of version 9. Called by the
// normalizers, the pre-tokenizers and the search for added tokens.
#pragma once

#include <string>
#include <string_view>

namespace longhaul::data {

bool is_white_space(char32_t c);

// Letters, marks, decimal digits, connectors and joiners (Unicode's \w, Technical Standard 18).
bool is_word_character(char32_t c);

// Where the white space at the beginning of `text` ends, and where that at its end begins.
size_t end_of_leading_space(std::string_view text);
size_t begin_of_trailing_space(std::string_view text);

// Character by character, without regard to its neighbours.
std::string lower_case(std::string_view text);

enum class NormalForm { kNfc, kNfd, kNfkc, kNfkd };

// `text` in that form; characters younger than Unicode 9 stay as they are, as in the package's
// tables. `text` must be valid UTF-8 and shorter than 2 GiB (else UserError).
std::string normal_form(NormalForm form, std::string_view text);

}  // namespace longhaul::data
