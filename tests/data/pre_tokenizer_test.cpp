#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "longhaul/base/error.h"
#include "longhaul/data/piece_cutter.h"
#include "longhaul/data/ruby_pattern.h"
#include "tests/data/temporary_folder.h"

namespace longhaul::data {
namespace {

using nlohmann::json;
using testing::ElementsAre;
using testing::HasSubstr;

const json kByteLevel = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}};

json split(const std::string& pattern, const std::string& kind = "Regex") {
  return {{"type", "Split"}, {"pattern", {{kind, pattern}}}, {"behavior", "Isolated"}};
}

json sequence(const std::vector<json>& parts) {
  return {{"type", "Sequence"}, {"pretokenizers", parts}};
}

std::vector<std::string> pieces(const json& description, std::string_view text) {
  const PreTokenizer pre_tokenizer(description);
  std::vector<std::string> result;
  PieceCutter(pre_tokenizer).cut(text, [&](std::string_view piece) { result.emplace_back(piece); });
  return result;
}

TEST(PreTokenizer, ByteLevelCutsWordsNumbersAndBlanks) {
  const json description = {{"type", "ByteLevel"}, {"add_prefix_space", false}};
  EXPECT_THAT(pieces(description, "I've 12 cats!!  \n x"),
              ElementsAre("I", "'ve", " 12", " cats", "!!", "  \n", " x"));
}

TEST(PreTokenizer, SplitKeepsMatchesAndWhatLiesBetween) {
  EXPECT_THAT(pieces(sequence({split("b+"), kByteLevel}), "abbcb"),
              ElementsAre("a", "bb", "c", "b"));
  EXPECT_THAT(pieces(sequence({split("."), kByteLevel}), "a\nb"), ElementsAre("a", "\n", "b"));
  EXPECT_THAT(pieces(sequence({split(".", "String"), kByteLevel}), "a.b"),
              ElementsAre("a", ".", "b"));
}

TEST(PreTokenizer, AnEmptyMatchCuts) {
  EXPECT_THAT(pieces(sequence({split("(?=x)"), kByteLevel}), "xaxbx"),
              ElementsAre("xa", "xb", "x"));
}

TEST(PreTokenizer, StepsSeeOnlyTheirPiece) {
  // Behind the first step "  " ends its piece, so that the look-ahead finds the end of the text.
  const json description = sequence({split("[0-9]"), split(R"(\s+(?!\S)|\s+)"), kByteLevel});
  EXPECT_THAT(pieces(description, "a  1"), ElementsAre("a", "  ", "1"));
}

TEST(PreTokenizer, Digits) {
  const json single = {{"type", "Digits"}, {"individual_digits", true}};
  const json runs = {{"type", "Digits"}, {"individual_digits", false}};
  EXPECT_THAT(pieces(sequence({single, kByteLevel}), "a12²"), ElementsAre("a", "1", "2", "²"));
  EXPECT_THAT(pieces(sequence({runs, kByteLevel}), "a12²"), ElementsAre("a", "12²"));
}

TEST(PreTokenizer, WhatIsNotSupportedIsNamed) {
  const auto error = [](const json& description) {
    return user_error([&] { PreTokenizer pre_tokenizer(description); });
  };
  EXPECT_THAT(error({{"type", "CharDelimiterSplit"}}), HasSubstr("CharDelimiterSplit"));
  EXPECT_THAT(error({{"typo", 1}}), HasSubstr("''"));
  json other = split("a");
  other["behavior"] = "Shuffled";
  EXPECT_THAT(error(other), AllOf(HasSubstr("Split"), HasSubstr("Shuffled")));
  other = split("a");
  other["pattern"] = "a";
  EXPECT_THAT(error(other), HasSubstr("'pattern' must be"));
  EXPECT_THAT(error({{"type", "Metaspace"}, {"replacement", "ab"}}), HasSubstr("one character"));
  EXPECT_THAT(error({{"type", "Metaspace"}, {"replacement", "_"}, {"prepend_scheme", "often"}}),
              HasSubstr("often"));
  EXPECT_THAT(error({{"type", "Digits"}, {"individual_digits", 1}}),
              HasSubstr("'individual_digits' is 1"));
}

TEST(Regex, RubyPatternsAreTranslated) {
  EXPECT_EQ(translate_ruby_pattern(R"(\\s\.[\]\[]a{1,3})"), R"(\\s\.[\]\[]a{1,3})");
  EXPECT_EQ(translate_ruby_pattern(R"(\h[\h])"), "[0-9a-fA-F][0-9a-fA-F]");
  EXPECT_EQ(translate_ruby_pattern(R"((?m:a)(?!b)(?i:c))"), "(?s:a)(?!b)(?i:c)");
  EXPECT_EQ(translate_ruby_pattern(R"(a{,2}b{1,}c{x})"), R"(a{0,2}b{1,}c\{x})");
  EXPECT_EQ(translate_ruby_pattern(R"(a(?#why)b++)"), "ab++");
  EXPECT_EQ(translate_ruby_pattern(R"(\u4e2d)"), R"(\x{4e2d})");
}

TEST(Regex, BlanksAreUnicodesNotPcres) {
  const Regex regex(R"(\s)");
  RegexMatcher blank(regex);
  EXPECT_TRUE(blank.find("\u3000", 0));
  EXPECT_TRUE(blank.find("\u0085", 0));
  EXPECT_FALSE(blank.find("\u180E", 0));
  EXPECT_FALSE(blank.find("\u200B", 0));
}

TEST(Regex, NewerCharactersThanPcreKnows) {
  const Regex sign(R"(\p{S})"), letter(R"([^\P{L}a])"), not_letter(R"(\P{L})");
  EXPECT_TRUE(RegexMatcher(sign).find("\U0001FAE8", 0));         // Unicode 15
  EXPECT_FALSE(RegexMatcher(not_letter).find("\U00031350", 0));  // Unicode 15
  EXPECT_TRUE(RegexMatcher(not_letter).find("\U0001FAE8", 0));
  EXPECT_TRUE(RegexMatcher(letter).find("b", 0));
}

TEST(Regex, WhatHasNoCounterpartIsNamed) {
  EXPECT_THAT(user_error([] { Regex regex("[a[bc]]"); }), HasSubstr("a set inside a set"));
  EXPECT_THAT(user_error([] { Regex regex("[a-z&&[^b]]"); }), HasSubstr("intersection"));
  EXPECT_THAT(user_error([] { Regex regex("a{1,2}+"); }), HasSubstr("quantifier"));
  EXPECT_THAT(user_error([] { Regex regex("(a"); }), HasSubstr("'(a' does not compile"));
  const std::pair<const char*, const char*> refused[] = {{R"(\p{Emoji})", R"(\p{Emoji})"},
                                                         {R"(\R)", R"(\R)"},
                                                         {R"((a)\1)", R"(\1)"},
                                                         {"(?<n>a)", "(?<n"},
                                                         {"a(?i)b|c", "(?i)"},
                                                         {"(?x: a)", "(?x"},
                                                         {"(*FAIL)", "(*"},
                                                         {"[[:punct:]]", "POSIX"},
                                                         {"(?i:grass)", "'ss'"},
                                                         {"(?i:\u00e4)", "beyond ASCII"},
                                                         {"a{2}?", "{n}?"},
                                                         {"\\", "backslash at the end"},
                                                         {"[a", "unfinished set"},
                                                         {"\\p{L", "unfinished"},
                                                         {"\\x{110000000}", "\\x"}};
  for (const auto& [pattern, name] : refused) {
    EXPECT_THAT(user_error([&, p = pattern] { Regex regex(p); }), HasSubstr(name)) << pattern;
  }
}

TEST(Regex, LongRunsNeedNoLimitAndNoStack) {
  const std::string blanks = std::string(20'000'000, ' ') + "x";
  const json description = sequence({split(R"(\s*[\r\n]+|\s+(?!\S)|\s+|\S(?:xy)*)"), kByteLevel});
  EXPECT_EQ(pieces(description, blanks).size(), 3u);
}

}  // namespace
}  // namespace longhaul::data
