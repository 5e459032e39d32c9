#include "longhaul/data/bpe_trainer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "longhaul/base/error.h"
#include "longhaul/base/file.h"
#include "longhaul/data/tokenizer.h"
#include "tests/data/temporary_folder.h"
#include "tests/support/source_folder.h"

namespace longhaul::data {
namespace {

using nlohmann::json;
using testing::ElementsAre;
using testing::HasSubstr;

std::vector<std::string> merges_of(const std::string& text) {
  return json::parse(text).at("model").at("merges").get<std::vector<std::string>>();
}

// The merges that Hugging Face's trainer learns from the same documents (vectors/make_vectors.py).
TEST(BpeTrainer, LearnsWhatThePackageLearns) {
  const json expected =
      json::parse(read_file(test::source_folder() + "/tests/data/vectors/trainer.json"));
  const auto merges = expected.at("merges").get<std::vector<std::string>>();
  ASSERT_EQ(merges.size(), 600u - 257);
  const auto result =
      train_bpe(expected.at("documents").get<std::vector<std::string>>(),
                {.vocab_size = 600, .pattern = expected.at("pattern").get<std::string>()});
  EXPECT_EQ(merges_of(result.json), merges);
  EXPECT_EQ(result.vocab_size, 600);
}

TEST(BpeTrainer, HighestCountFirstThenLowestIds) {
  // "ab" and "cd" three times each; a comes before c. Then "abe" twice.
  const auto result =
      train_bpe({"ab cd ab cd ab cd", "abe abe"},
                {.vocab_size = 257 + 3, .special_tokens = {"<s>"}, .pattern = R"(\w+)"});
  EXPECT_THAT(merges_of(result.json), ElementsAre("a b", "c d", "ab e"));
}

TEST(BpeTrainer, TheOrderOfDocumentsDoesNotMatter) {
  const BpeTrainingOptions options = {.vocab_size = 290};
  const std::vector<std::string> documents = {"the cat sat", "on the mat", "that the hat"};
  const std::vector<std::string> turned(documents.rbegin(), documents.rend());
  EXPECT_EQ(train_bpe(documents, options).json, train_bpe(turned, options).json);
}

TEST(BpeTrainer, TheResultLoadsAndRoundTrips) {
  const std::vector<std::string> documents = {"def f(x):\n    return x\n",
                                              "def g(x):\n    return 1\n",
                                              "größer \U0001F642 größer \U0001F642"};
  const auto result = train_bpe(documents, {.vocab_size = 300});
  const auto tokenizer = Tokenizer::parse(result.json, "trained");
  EXPECT_EQ(tokenizer.vocab_size(), result.vocab_size);
  EXPECT_EQ(tokenizer.eos_id(), result.vocab_size - 1);
  for (const auto& document : documents) {
    const auto ids = tokenizer.encode(document);
    EXPECT_LT(ids.size(), document.size());
    EXPECT_EQ(tokenizer.decode(ids), document);
  }
  std::string all_bytes;
  for (int byte = 1; byte < 128; ++byte) all_bytes += static_cast<char>(byte);
  EXPECT_EQ(tokenizer.decode(tokenizer.encode(all_bytes)), all_bytes);
}

TEST(BpeTrainer, TooLittleTextGivesASmallerVocabulary) {
  EXPECT_EQ(train_bpe({"x"}, {.vocab_size = 1000}).vocab_size, 257);
  EXPECT_EQ(train_bpe({"xyxy"}, {.vocab_size = 1000}).vocab_size, 258);
}

TEST(BpeTrainer, ASpecialTokenNeverComesOutOfText) {
  const auto result = train_bpe({"xy xy xy"}, {.vocab_size = 300, .special_tokens = {"xy"}});
  EXPECT_THAT(merges_of(result.json), testing::Not(testing::Contains("x y")));
}

TEST(BpeTrainer, BadInput) {
  EXPECT_THAT(user_error([] { train_bpe({}, {.vocab_size = 300}); }), HasSubstr("no text"));
  EXPECT_THAT(user_error([] { train_bpe({"", ""}, {.vocab_size = 300}); }), HasSubstr("no text"));
  EXPECT_THAT(user_error([] { train_bpe({"a"}, {.vocab_size = 256}); }), HasSubstr("257"));
  EXPECT_THAT(user_error([] { train_bpe({"a"}, {.vocab_size = 300, .pattern = "("}); }),
              HasSubstr("'('"));
  EXPECT_THAT(
      user_error([] { train_bpe({"a"}, {.vocab_size = 300, .special_tokens = {"<\xFF>"}}); }),
      HasSubstr("'<\uFFFD>' is not UTF-8"));
  EXPECT_EQ(train_bpe({"a\xFF"}, {.vocab_size = 300}).vocab_size, 257);
}

TEST(BpeTrainer, ReportsItsProgress) {
  std::vector<int64_t> seen;
  train_bpe({"abc abc"}, {.vocab_size = 260}, [&](int64_t done, int64_t total) {
    seen.push_back(done);
    EXPECT_EQ(total, 3);
  });
  EXPECT_THAT(seen, ElementsAre(1, 2));  // "ab", then "abc"; " " with "abc" occurs once only
}

}  // namespace
}  // namespace longhaul::data
