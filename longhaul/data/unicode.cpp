#include "longhaul/data/unicode.h"

#include <unicode/bytestream.h>
#include <unicode/normalizer2.h>
#include <unicode/uchar.h>
#include <unicode/uniset.h>

#include <algorithm>
#include <array>
#include <limits>

#include "longhaul/base/error.h"
#include "longhaul/data/unicode_sets.h"
#include "longhaul/data/utf8.h"

namespace longhaul::data {
namespace {

void check(UErrorCode status, const char* what) {
  LONGHAUL_CHECK(U_SUCCESS(status), "ICU: {}: {}", what, u_errorName(status));
}

icu::UnicodeSet make_set(const std::string& pattern) {
  UErrorCode status = U_ZERO_ERROR;
  icu::UnicodeSet set(icu::UnicodeString::fromUTF8(pattern), status);
  check(status, "a set of characters");
  set.freeze();
  return set;
}

const icu::Normalizer2& normalizer_of(NormalForm form) {
  UErrorCode status = U_ZERO_ERROR;
  const icu::Normalizer2* found = nullptr;
  switch (form) {
    case NormalForm::kNfc:
      found = icu::Normalizer2::getNFCInstance(status);
      break;
    case NormalForm::kNfd:
      found = icu::Normalizer2::getNFDInstance(status);
      break;
    case NormalForm::kNfkc:
      found = icu::Normalizer2::getNFKCInstance(status);
      break;
    case NormalForm::kNfkd:
      found = icu::Normalizer2::getNFKDInstance(status);
      break;
  }
  check(status, "a normal form");
  return *found;
}

// Capital letters that ICU 72 (Unicode 15) does not know as such, with their small ones.
struct CapitalRange {
  char32_t first, last;
  int32_t to_small;  // the difference
};
constexpr std::array<CapitalRange, 11> kYoungCapitals = {{{0x1C89, 0x1C89, 1},
                                                          {0xA7CB, 0xA7CB, 0x264 - 0xA7CB},
                                                          {0xA7CC, 0xA7CC, 1},
                                                          {0xA7CE, 0xA7CE, 1},
                                                          {0xA7D2, 0xA7D2, 1},
                                                          {0xA7D4, 0xA7D4, 1},
                                                          {0xA7DA, 0xA7DA, 1},
                                                          {0xA7DC, 0xA7DC, 0x19B - 0xA7DC},
                                                          {0x10D50, 0x10D65, 0x20},
                                                          {0x16EA0, 0x16EB8, 0x1B},
                                                          {0x10FFFF, 0x10FFFF, 0}}};

char32_t small_letter(char32_t c) {
  const auto* range = std::find_if(kYoungCapitals.begin(), kYoungCapitals.end(),
                                   [c](const CapitalRange& r) { return c <= r.last; });
  if (c >= range->first) return static_cast<char32_t>(static_cast<int32_t>(c) + range->to_small);
  return static_cast<char32_t>(u_tolower(static_cast<UChar32>(c)));
}

}  // namespace

bool is_white_space(char32_t c) {
  return (c >= 0x9 && c <= 0xD) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

bool is_word_character(char32_t c) {
  static const icu::UnicodeSet set = make_set("[" + word_members() + "]");
  return set.contains(static_cast<UChar32>(c));
}

size_t end_of_leading_space(std::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    const CodePoint c = code_point_at(text, at);
    if (!is_white_space(c.value)) break;
    at += c.length;
  }
  return at;
}

size_t begin_of_trailing_space(std::string_view text) {
  size_t at = text.size();
  while (at > 0) {
    const size_t begin = begin_of_character_before(text, at);
    if (!is_white_space(code_point_at(text, begin).value)) break;
    at = begin;
  }
  return at;
}

std::string lower_case(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t at = 0; at < text.size();) {
    const CodePoint c = code_point_at(text, at);
    // The one capital with a small form of two characters: an i and the dot above it.
    if (c.value == 0x130) {
      out += "i\u0307";
    } else {
      append_utf8(out, small_letter(c.value));
    }
    at += c.length;
  }
  return out;
}

std::string normal_form(NormalForm form, std::string_view text) {
  if (text.size() > std::numeric_limits<int32_t>::max()) {
    fail_user("a text of {} bytes is too long to be normalized (2 GiB)", text.size());
  }
  const icu::Normalizer2& all = normalizer_of(form);
  const icu::StringPiece piece(text.data(), static_cast<int32_t>(text.size()));
  UErrorCode status = U_ZERO_ERROR;
  // Text that is normal by the newest tables is so by older ones: to them a character that they do
  // not know never changes or moves.
  const bool is_normal = all.isNormalizedUTF8(piece, status);
  check(status, "isNormalizedUTF8");
  if (is_normal) return std::string(text);
  static const icu::UnicodeSet known = make_set("[:age=9:]");
  const icu::FilteredNormalizer2 filtered(all, known);
  std::string out;
  icu::StringByteSink<std::string> sink(&out, piece.length());
  filtered.normalizeUTF8(0, piece, sink, nullptr, status);
  check(status, "normalizeUTF8");
  return out;
}

}  // namespace longhaul::data
