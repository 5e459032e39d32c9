#include "longhaul/data/text_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "longhaul/base/error.h"
#include "tests/data/temporary_folder.h"

namespace longhaul::data {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(TextFile, SoundTextIsReadAsItIs) {
  const TemporaryFolder folder;
  for (const std::string text : {"", "plain", "\xEF\xBB\xBF\u4E2D\r\n\x7F"}) {
    const auto file = read_text_file(folder.write("a", text), InvalidText::kStop);
    EXPECT_EQ(file.text, text);
    EXPECT_FALSE(file.replaced);
  }
}

TEST(TextFile, TheFirstWrongByteIsNamed) {
  const TemporaryFolder folder;
  const auto error = [&](const std::string& text) {
    const auto path = folder.write("a", text);
    return user_error([&] { read_text_file(path, InvalidText::kStop); });
  };
  EXPECT_THAT(error(std::string("ab\nc\0d\xFF", 7)),
              AllOf(HasSubstr("/a:2: a NUL byte"), HasSubstr("byte 4 "), HasSubstr("replace")));
  EXPECT_THAT(error(std::string("\n\n\xE9t\xE9\0", 6)),
              AllOf(HasSubstr("/a:3: 0xE9 is not UTF-8"), HasSubstr("byte 2 ")));
  EXPECT_THAT(error("whole \xE4\xB8"), HasSubstr("/a:1: 0xE4 is not UTF-8"));
  EXPECT_THAT(error(std::string(1, '\0')), HasSubstr("/a:1: a NUL byte"));
}

TEST(TextFile, WhatIsWrongIsReplaced) {
  const TemporaryFolder folder;
  const auto file =
      read_text_file(folder.write("a", std::string("a\0\xFF\xC3(\0", 6)), InvalidText::kReplace);
  EXPECT_EQ(file.text, "a\uFFFD\uFFFD\uFFFD(\uFFFD");
  EXPECT_TRUE(file.replaced);
}

}  // namespace
}  // namespace longhaul::data
