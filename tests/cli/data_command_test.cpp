// `longhaul data prepare` and `inspect` as a user runs them.
#include "longhaul/base/fault.h"
#include "tests/cli/small_job.h"

namespace longhaul {
namespace {

using test::spill;
using test::Words;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;

class DataCommand : public test::SmallJob {
 protected:
  test::ProgramResult data(Words words, const Words& environment = {}) const {
    words.insert(words.begin(), "data");
    return run(words, environment);
  }
  test::ProgramResult prepare(const Words& environment = {}) const {
    return data({"prepare", "corpus/train", "--tokenizer", "tokenizer", "--output", "tokens",
                 "--threads", "1"},
                environment);
  }
};

TEST_F(DataCommand, InspectCountsAndMarksDocuments) {
  spill(path("rows"),
        "{\"text\": \"the model reads\"}\n{\"text\": \"a long text\"}\n{\"text\": \"\"}\n"
        "{\"text\": \"the model reads\"}\n{\"text\": 7}\n");
  const auto result = data({"inspect", "rows", "--tokenizer", "tokenizer"});
  ASSERT_EQ(result.status, 0) << result.err;
  for (const char* row :
       {"files of JSONL +1\n", "\ndocuments +3\n", "\n  duplicates +1\n",
        "\n  empty, left out +1\n", "\n  bad, left out +1\n", "\ntokens a byte +0[.][0-9]{4}\n"}) {
    EXPECT_THAT(result.out, ContainsRegex(row));
  }
  EXPECT_THAT(result.out, ContainsRegex("----- document 1: [0-9]+ tokens\nthe model reads.*\n"
                                        "----- document 2: [0-9]+ tokens\na long text"));
  EXPECT_THAT(result.err, HasSubstr("rows:5: the field \"text\" is a number"));
  const auto cut = data({"inspect", "rows", "--tokenizer", "tokenizer", "--sample-tokens", "1"});
  EXPECT_THAT(cut.out, HasSubstr("----- document 1: 1 tokens, cut here\n"));
  expect_user_error(
      data({"inspect", "rows", "--tokenizer", "tokenizer", "--bad-documents", "error"}),
      {"rows:5: the field \"text\" is a number", "--bad-documents skip"});
  expect_user_error(data({"inspect", "rows"}), {"give --tokenizer"});
}

// As training does; the counts are printed all the same.
TEST_F(DataCommand, InspectRefusesACorpusWithoutASoundDocument) {
  spill(path("rows"), "{\"text\": 7}\n{\"text\": \"\"}\n{}\n");
  const auto result = data({"inspect", "rows", "--tokenizer", "tokenizer"});
  expect_user_error(result, {"all documents of the corpus are bad or empty (2 bad)"});
  EXPECT_THAT(result.out, ContainsRegex("\n  bad, left out +2\n"));
}

TEST_F(DataCommand, BadDocumentsAreAnErrorOrLeftOutOfAPreparation) {
  spill(path("rows"), "{\"text\": \"the model reads\"}\n{\"text\": null}\n{}\n");
  Words words = {"prepare", "rows", "--tokenizer", "tokenizer", "--output", "tokens"};
  expect_user_error(data(words), {"rows:2: the field \"text\" is null"});
  words.insert(words.end(), {"--bad-documents", "skip"});
  const auto result = data(words);
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.err, AllOf(HasSubstr("2 bad documents are left out"), HasSubstr("1 documents"),
                                HasSubstr("in 1 shards")));
}

// Killed before and after each of its renames; the same command goes on, and training takes it.
TEST_F(DataCommand, APreparationThatIsKilledGoesOn) {
  if (!fault::kCompiledIn) GTEST_SKIP() << "built with LONGHAUL_FAULTS=OFF";
  ASSERT_EQ(prepare().status, 0);
  const std::string manifest = test::slurp(path("tokens/longhaul_tokens.json"));
  int kills = 0;
  for (int nth = 1; nth < 20; ++nth) {
    fs::remove_all(path("tokens"));
    const auto killed = prepare({"LONGHAUL_FAULT=file.rename:" + std::to_string(nth) + ":kill"});
    if (killed.killed_by != SIGKILL) break;
    ++kills;
    const auto again = prepare();
    EXPECT_EQ(again.status, 0) << again.err;
    EXPECT_EQ(test::slurp(path("tokens/longhaul_tokens.json")), manifest) << nth;
  }
  EXPECT_EQ(kills, 4);  // plan, shard, its list, manifest
  expect_trained(train_only({"--training.dataset_path", "tokens"}));
}

TEST_F(DataCommand, OutputInsideTheInputIsRefused) {
  expect_user_error(
      data({"prepare", "corpus", "--tokenizer", "tokenizer", "--output", "corpus/tokens"}),
      {"'corpus/tokens' lies inside the corpus 'corpus'"});
}

TEST_F(DataCommand, TokensOfAnotherTokenizerAreRefusedInTheSameJob) {
  ASSERT_EQ(prepare().status, 0);
  ASSERT_EQ(run({"tokenizer", "train", "--input", "corpus/train", "--vocab-size", "300", "--output",
                 "other/tokenizer.json"})
                .status,
            0);
  ASSERT_EQ(
      data({"prepare", "corpus/validation", "--tokenizer", "other", "--output", "others"}).status,
      0);
  fs::remove_all(path("tokenizer"));
  expect_user_error(
      train({"--training.dataset_path", "tokens", "--validation.dataset_path", "others"}),
      {"validation.dataset_path", "prepared with another tokenizer"});
  expect_user_error(train_only({"--training.dataset_path", "None", "--training.mix",
                                "[{path = \"tokens\"}, {path = \"others\"}]"}),
                    {"training.mix", "prepared with another tokenizer"});
}

}  // namespace
}  // namespace longhaul
