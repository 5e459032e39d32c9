#include "longhaul/data/tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "longhaul/base/error.h"
#include "longhaul/base/file.h"
#include "tests/data/temporary_folder.h"
#include "tests/support/source_folder.h"

namespace longhaul::data {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

std::string vector_file(const std::string& name) {
  return test::source_folder() + "/tests/data/vectors/" + name;
}

// Some bytes, "ab", "abc" and two added tokens.
json small_file() {
  json vocab = json::object();
  int id = 0;
  for (const char* token : {"a", "b", "c", "Ġ", "ab", "abc", "d", "Ã", "©", "ï", "¿", "½", "Ā"}) {
    vocab[token] = id++;
  }
  return {{"normalizer", nullptr},
          {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}}},
          {"decoder", {{"type", "ByteLevel"}}},
          {"added_tokens",
           {{{"id", 13}, {"content", "<|endoftext|>"}, {"special", true}},
            {{"id", 15}, {"content", "<x>"}, {"special", false}}}},
          {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", {"a b", "ab c"}}}}};
}

Tokenizer small() { return Tokenizer::parse(small_file().dump(), "small.json"); }

TEST(Tokenizer, TruncationAndPaddingAreRefusedByName) {
  const std::pair<const char*, json> settings[] = {
      {"truncation", {{"max_length", 8}, {"strategy", "LongestFirst"}, {"stride", 0}}},
      {"padding", {{"strategy", "BatchLongest"}, {"pad_id", 0}}}};
  for (const auto& [key, value] : settings) {
    json file = small_file();
    file[key] = nullptr;
    EXPECT_NO_THROW(Tokenizer::parse(file.dump(), "t.json")) << key;
    file[key] = value;
    EXPECT_THAT(user_error([&] { Tokenizer::parse(file.dump(), "t.json"); }),
                AllOf(HasSubstr(std::string("t.json: ") + key), HasSubstr("set it to null")));
  }
}

class Vectors : public testing::TestWithParam<const char*> {};

// Texts, ids and decoded texts as Hugging Face's package has them (vectors/make_vectors.py).
TEST_P(Vectors, EncodeAndDecodeAsThePackageDoes) {
  const auto tokenizer = Tokenizer::load(vector_file(std::string(GetParam()) + ".json"));
  Encoder encoder(tokenizer);
  std::istringstream lines(read_file(vector_file(std::string(GetParam()) + ".cases.jsonl")));
  int cases = 0;
  for (std::string line; std::getline(lines, line); ++cases) {
    const json row = json::parse(line);
    const auto expected = row["ids"].get<std::vector<int32_t>>();
    const auto text = row["text"].get<std::string>();
    ASSERT_EQ(tokenizer.encode(text), expected) << line;
    std::vector<int32_t> ids;
    encoder.encode(text, ids);
    ASSERT_EQ(ids, expected) << "with an encoder used before: " << line;
    ASSERT_EQ(tokenizer.decode(expected), row["decoded"].get<std::string>()) << line;
  }
  EXPECT_GT(cases, 90);
}

INSTANTIATE_TEST_SUITE_P(Tokenizer, Vectors,
                         testing::Values("gpt2_like", "deepseek_like", "ignore_merges", "digits"));

TEST(Tokenizer, EncodesDecodesAndCounts) {
  const auto tokenizer = small();
  EXPECT_THAT(tokenizer.encode("abc ab<|endoftext|>a"), ElementsAre(5, 3, 4, 13, 0));
  EXPECT_EQ(tokenizer.decode(std::vector<int32_t>{5, 3, 4, 13, 0}), "abc ab<|endoftext|>a");
  EXPECT_EQ(tokenizer.vocab_size(), 16);  // the id 14 is a hole
  EXPECT_EQ(tokenizer.token_id("Ġ"), 3);
  EXPECT_EQ(tokenizer.token_id("zzz"), std::nullopt);
  EXPECT_EQ(tokenizer.eos_id(), 13);
  EXPECT_EQ(tokenizer.bos_id(), std::nullopt);
  EXPECT_EQ(tokenizer.text_bytes(5), 3);
  EXPECT_EQ(tokenizer.text_bytes(3), 1);
  EXPECT_EQ(tokenizer.text_bytes(13), 0);
  EXPECT_EQ(tokenizer.text_bytes(15), 3);
  EXPECT_TRUE(tokenizer.encode("").empty());
}

TEST(Tokenizer, BrokenTextAndNulBytes) {
  const auto tokenizer = small();
  EXPECT_EQ(tokenizer.encode("a\xF0\x9F"), tokenizer.encode("a\uFFFD"));
  EXPECT_THAT(tokenizer.encode("a\uFFFD"), ElementsAre(0, 9, 10, 11));
  EXPECT_THAT(tokenizer.encode(std::string_view("a\0", 2)), ElementsAre(0, 12));
  EXPECT_EQ(tokenizer.decode(std::vector<int32_t>{7, 0}), "\uFFFDa");
  EXPECT_EQ(tokenizer.decode_bytes(std::vector<int32_t>{7, 0}), "\xC3\x61");
}

TEST(Tokenizer, AnIdOutsideTheVocabularyIsAnError) {
  const auto tokenizer = small();
  for (const int32_t id : {-1, 14, 16}) {
    EXPECT_THAT(user_error([&] { tokenizer.decode(std::vector<int32_t>{id}); }),
                HasSubstr(std::to_string(id)));
  }
}

TEST(Tokenizer, TheConfigBesideItNamesEosAndBos) {
  const TemporaryFolder folder;
  folder.write("tokenizer.json", small_file().dump());
  folder.write("tokenizer_config.json", R"({"eos_token": {"content": "<x>"}, "bos_token": "a"})");
  const auto tokenizer = Tokenizer::load(folder.path());
  EXPECT_EQ(tokenizer.eos_id(), 15);
  EXPECT_EQ(tokenizer.bos_id(), 0);
  folder.write("tokenizer_config.json", R"({"eos_token": "<nowhere>"})");
  EXPECT_THAT(user_error([&] { Tokenizer::load(folder.path()); }),
              AllOf(HasSubstr("tokenizer_config.json"), HasSubstr("<nowhere>")));
  folder.write("tokenizer_config.json", "{");
  EXPECT_THAT(user_error([&] { Tokenizer::load(folder.path()); }),
              HasSubstr("tokenizer_config.json"));
}

std::string error_of(const json& file) {
  return user_error([&] { Tokenizer::parse(file.dump(), "x/tokenizer.json"); });
}

json with(const char* pointer, const json& value) {
  json file = small_file();
  file[json::json_pointer(pointer)] = value;
  return file;
}

TEST(Tokenizer, WhatIsNotSupportedIsNamed) {
  EXPECT_THAT(error_of(with("/normalizer", {{"type", "BertNormalizer"}})),
              AllOf(HasSubstr("x/tokenizer.json: normalizer"), HasSubstr("BertNormalizer")));
  EXPECT_THAT(error_of(with("/decoder", {{"type", "WordPiece"}})),
              AllOf(HasSubstr("decoder"), HasSubstr("WordPiece")));
  EXPECT_THAT(error_of(with("/model/type", "Unigram")), HasSubstr("Unigram"));
  EXPECT_THAT(error_of(with("/model/dropout", 0.1)), HasSubstr("dropout"));
  EXPECT_THAT(error_of(with("/pre_tokenizer/type", "UnicodeScripts")),
              AllOf(HasSubstr("pre_tokenizer"), HasSubstr("UnicodeScripts")));
  EXPECT_THAT(error_of(with("/post_processor", {{"type", "BertProcessing"}})),
              AllOf(HasSubstr("post_processor"), HasSubstr("BertProcessing")));
}

json nested(const char* parts, int depth) {
  json component = {{"type", "Sequence"}, {parts, json::array()}};
  for (int i = 0; i < depth; ++i) component = {{"type", "Sequence"}, {parts, {component}}};
  return component;
}

TEST(Tokenizer, SequencesInSequencesEnd) {
  EXPECT_NO_THROW(Tokenizer::parse(with("/normalizer", nested("normalizers", 8)).dump(), "x"));
  const char* kinds[][2] = {{"/normalizer", "normalizers"},
                            {"/pre_tokenizer", "pretokenizers"},
                            {"/decoder", "decoders"},
                            {"/post_processor", "processors"}};
  for (const auto& [place, parts] : kinds) {
    EXPECT_THAT(error_of(with(place, nested(parts, 100))), HasSubstr("nested more than"));
    EXPECT_THAT(error_of(with(place, {{"type", "Sequence"}})), HasSubstr(parts));
  }
}

TEST(Tokenizer, HostileSizesAreErrors) {
  EXPECT_THAT(error_of(with("/model/vocab/a", 9'000'000)),
              HasSubstr("expected a number from 0 to"));
  json bomb = json::array();
  for (int i = 0; i < 40; ++i) {
    bomb.push_back({{"type", "Replace"}, {"pattern", {{"String", "a"}}}, {"content", "aa"}});
  }
  const json normalizer = {{"type", "Sequence"}, {"normalizers", bomb}};
  const auto tokenizer = Tokenizer::parse(with("/normalizer", normalizer).dump(), "x");
  EXPECT_THAT(user_error([&] { tokenizer.encode("a"); }), HasSubstr("more than"));
  const json decoder = {{"type", "Sequence"}, {"decoders", bomb}};
  const auto other = Tokenizer::parse(with("/decoder", decoder).dump(), "x");
  EXPECT_THAT(user_error([&] { other.decode(std::vector<int32_t>{0}); }), HasSubstr("more than"));
  const json spell = {{"type", "ByteLevel"}, {"use_regex", false}};  // doubles "é"
  const auto sequence = [](const json& parts) -> json {
    return {{"type", "Sequence"}, {"pretokenizers", parts}};
  };
  const json many = sequence(std::vector<json>(60, spell)),
             too_many = sequence(std::vector<json>(70, spell));
  const auto speller = Tokenizer::parse(with("/pre_tokenizer", many).dump(), "x");
  EXPECT_THAT(user_error([&] { speller.encode("é"); }), HasSubstr("more than"));
  EXPECT_THAT(error_of(with("/pre_tokenizer", too_many)), HasSubstr("more than 64 components"));
  const json slow = {{"type", "Split"},
                     {"pattern", {{"Regex", "(?:a+)+b|(?:a+)+c"}}},
                     {"behavior", "Isolated"},
                     {"invert", false}};
  const auto third = Tokenizer::parse(with("/pre_tokenizer", slow).dump(), "x");
  EXPECT_THAT(user_error([&] { third.encode(std::string(60, 'a')); }), HasSubstr("gave up"));
}

TEST(Tokenizer, AnUnkTokenThatIsNotThereIsAnErrorWhenItIsNeeded) {
  const auto tokenizer = Tokenizer::parse(with("/model/unk_token", "<unk>").dump(), "x");
  EXPECT_THAT(tokenizer.encode("ab"), ElementsAre(4));
  EXPECT_THAT(user_error([&] { tokenizer.encode("z"); }),
              AllOf(HasSubstr("'z'"), HasSubstr("<unk>")));
}

TEST(Tokenizer, TheTemplateNamesWhatBeginsAndEndsAText) {
  const auto special = [](const char* name) -> json { return {{"SpecialToken", {{"id", name}}}}; };
  const json text = {{"Sequence", {{"id", "A"}}}};
  const json around = {
      {"type", "TemplateProcessing"},
      {"single", {special("<x>"), special("b"), text, special("a"), special("c")}}};
  const auto tokenizer = Tokenizer::parse(with("/post_processor", around).dump(), "x");
  EXPECT_EQ(tokenizer.bos_id(), 15);
  EXPECT_EQ(tokenizer.eos_id(), 2);
  EXPECT_THAT(tokenizer.encode("ab"), ElementsAre(4));  // nothing is added
}

TEST(Tokenizer, TextBytesWithoutAByteLevel) {
  const json file = {{"decoder", {{"type", "Metaspace"}, {"replacement", "▁"}}},
                     {"model",
                      {{"type", "BPE"},
                       {"byte_fallback", true},
                       {"vocab", {{"▁the", 0}, {"é", 1}, {"<0xC3>", 2}}},
                       {"merges", json::array()}}}};
  const auto tokenizer = Tokenizer::parse(file.dump(), "x");
  EXPECT_EQ(tokenizer.text_bytes(0), 4);
  EXPECT_EQ(tokenizer.text_bytes(1), 2);
  EXPECT_EQ(tokenizer.text_bytes(2), 1);
}

TEST(Tokenizer, BrokenFilesAreErrors) {
  EXPECT_THAT(user_error([] { Tokenizer::load("/nowhere/tokenizer.json"); }),
              HasSubstr("/nowhere/tokenizer.json"));
  EXPECT_THAT(user_error([] { Tokenizer::parse("{\"model\": ", "t.json"); }), HasSubstr("t.json"));
  EXPECT_THAT(user_error([] { Tokenizer::parse("[1]", "t.json"); }), HasSubstr("t.json"));
  EXPECT_THAT(error_of(with("/model", 3)), HasSubstr("model"));
  EXPECT_THAT(error_of(with("/model/vocab/a", -1)), HasSubstr("-1"));
  EXPECT_THAT(error_of(with("/model/vocab/a", 1e18)), HasSubstr("'a'"));
  EXPECT_THAT(error_of(with("/model/vocab/a", 1)), HasSubstr("two tokens have the id 1"));
  EXPECT_THAT(error_of(with("/model/merges/0", "a z")), HasSubstr("'z', which is missing"));
  EXPECT_THAT(error_of(with("/model/merges/0", "b a")), HasSubstr("'ba', which is missing"));
  EXPECT_THAT(error_of(with("/model/merges/1", "abc")), HasSubstr("merge number 1"));
  EXPECT_THAT(error_of(with("/model/merges/1", {"a"})), HasSubstr("merge number 1"));
  EXPECT_THAT(error_of(with("/added_tokens/0/content", "a")), HasSubstr("vocabulary says 0"));
  EXPECT_THAT(error_of(with("/added_tokens/0/content", "")), HasSubstr("empty"));
  EXPECT_THAT(error_of(with("/added_tokens/0/id", 15)), HasSubstr("two tokens have the id 15"));
  EXPECT_THAT(error_of(with("/added_tokens/0", 5)), HasSubstr("x/tokenizer.json"));
}

TEST(Tokenizer, BothFormsOfMergesAreTheSame) {
  const auto pairs = with("/model/merges", json::array({{"a", "b"}, {"ab", "c"}}));
  EXPECT_EQ(Tokenizer::parse(pairs.dump(), "pairs").encode("abcab"), small().encode("abcab"));
}

}  // namespace
}  // namespace longhaul::data
