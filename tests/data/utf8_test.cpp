#include "longhaul/data/utf8.h"

#include <gtest/gtest.h>

#include "longhaul/data/byte_alphabet.h"

namespace longhaul::data {
namespace {

TEST(Utf8, ValidTextIsTold) {
  EXPECT_TRUE(is_valid_utf8(std::string_view("a\0\u00E9\u4E2D\U0001F642", 11)));
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
