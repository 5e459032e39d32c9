#include "longhaul/base/utf8.h"

#include <gtest/gtest.h>

namespace longhaul {
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

TEST(Utf8, EveryKindOfSecondByteOutOfItsRangeIsFound) {
  EXPECT_EQ(first_invalid_utf8("\xE0\x9F\xBF"), 0u);  // overlong
  EXPECT_EQ(first_invalid_utf8("\xE0\xA0\x80"), std::string_view::npos);
  EXPECT_EQ(first_invalid_utf8("\xED\xA0\x80"), 0u);  // a surrogate
  EXPECT_EQ(first_invalid_utf8("\xED\x9F\xBF"), std::string_view::npos);
  EXPECT_EQ(first_invalid_utf8("\xF0\x8F\xBF\xBF"), 0u);  // overlong
  EXPECT_EQ(first_invalid_utf8("\xF0\x90\x80\x80"), std::string_view::npos);
  EXPECT_EQ(first_invalid_utf8("\xF4\x90\x80\x80"), 0u);  // above U+10FFFF
  EXPECT_EQ(first_invalid_utf8("\xF4\x8F\xBF\xBF"), std::string_view::npos);
}

TEST(Utf8, ValidTextIsLeftAlone) {
  const std::string text("a\0\u00E9\u4E2D\U0001F642", 11);
  EXPECT_EQ(first_invalid_utf8(text), std::string_view::npos);
  EXPECT_EQ(repair_utf8(text), text);
}

}  // namespace
}  // namespace longhaul
