#include "longhaul/data/utf8.h"

#include <gtest/gtest.h>

#include "longhaul/data/byte_alphabet.h"

namespace longhaul::data {
namespace {

std::string replaced(int count) {
  std::string text;
  for (int i = 0; i < count; ++i) text += "\uFFFD";
  return text;
}

// Expected counts: Python's bytes.decode(errors="replace").
TEST(Utf8, BrokenPartsAreReplacedAsInPython) {
  EXPECT_EQ(repair_utf8("\xF0\x9F\x98"), replaced(1));
  EXPECT_EQ(repair_utf8("\xED\xA0\x80"), replaced(3));      // a surrogate
  EXPECT_EQ(repair_utf8("\xE0\x80"), replaced(2));          // overlong
  EXPECT_EQ(repair_utf8("\xF4\x90\x80\x80"), replaced(4));  // above U+10FFFF
  EXPECT_EQ(repair_utf8("\xC0\xAF"), replaced(2));
  EXPECT_EQ(repair_utf8("\xFF\xFE"), replaced(2));
  EXPECT_EQ(repair_utf8("a\xE4\xB8z\x80"), "a" + replaced(1) + "z" + replaced(1));
  EXPECT_EQ(repair_utf8("\xE4\xB8\xE4\xB8\xAD"), replaced(1) + "\u4E2D");
}

TEST(Utf8, TheFirstBrokenPartIsFound) {
  EXPECT_EQ(first_invalid_utf8(""), std::string_view::npos);
  EXPECT_EQ(first_invalid_utf8("a\u4E2D"), std::string_view::npos);
  EXPECT_EQ(first_invalid_utf8("a\u4E2D\xFFz\xFF"), 4u);
  EXPECT_EQ(first_invalid_utf8("ab\xE4\xB8"), 2u);
}

TEST(Utf8, ValidTextIsLeftAlone) {
  const std::string text("a\0\u00E9\u4E2D\U0001F642", 11);
  EXPECT_TRUE(is_valid_utf8(text));
  EXPECT_EQ(repair_utf8(text), text);
  EXPECT_FALSE(is_valid_utf8("\xED\xA0\x80"));
}

TEST(Utf8, CodePointsThereAndBack) {
  for (const char32_t value : {0x0, 0x7F, 0x80, 0x7FF, 0x800, 0xFFFD, 0x10000, 0x10FFFF}) {
    std::string text;
    append_utf8(text, value);
    EXPECT_EQ(code_point_at(text, 0).value, value);
    EXPECT_EQ(code_point_at(text, 0).length, text.size());
  }
}

TEST(ByteAlphabet, KnownSpellings) {
  EXPECT_EQ(to_byte_alphabet(" a\n"), "ĠaĊ");
  EXPECT_EQ(to_byte_alphabet("\u00E9"), "Ã©");
  EXPECT_EQ(from_byte_alphabet("Ġthe"), " the");
  EXPECT_EQ(from_byte_alphabet("<｜x▁y｜>"), std::nullopt);
  EXPECT_EQ(bytes_in_alphabet_order()[0], '!');
}

TEST(ByteAlphabet, EveryByteThereAndBack) {
  for (int byte = 0; byte < 256; ++byte) {
    const std::string one(1, static_cast<char>(byte));
    EXPECT_EQ(from_byte_alphabet(to_byte_alphabet(one)), one) << byte;
  }
}

}  // namespace
}  // namespace longhaul::data
