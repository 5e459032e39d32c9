// Data that ends: processes of which one has no rows for the next step all end at the same step.
#include <algorithm>
#include <set>

#include "tests/cli/small_job.h"

namespace longhaul::test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

class EndOfData : public SmallJob {
 protected:
  // Rows of 64 ids, each with its number among them.
  void write_rows(const std::string& name, int rows) const {
    std::string text;
    for (int row = 0; row < rows; ++row) {
      std::vector<int> ids(64, 1);
      for (size_t t = 0; t < ids.size(); ++t) ids[t] = (row * 31 + static_cast<int>(t * t)) % 300;
      text += nlohmann::json{{"input_ids", ids}}.dump() + "\n";
    }
    spill(path(name), text);
  }
  ProgramResult train_rows(const std::string& rows, const Words& more) const {
    Words words = {"--training.dataset",
                   "tokenized",
                   "--training.dataset_path",
                   rows,
                   "--training.no_repeat",
                   "--training.local_batch_size",
                   "1",
                   "--training.steps",
                   "100",
                   "--comm.train_timeout_seconds",
                   "20"};
    words.insert(words.end(), more.begin(), more.end());
    return train(words);
  }
  std::set<std::string> checkpoints() const {
    std::set<std::string> names;
    for (const auto& entry : fs::directory_iterator(path("run/checkpoint"))) {
      names.insert(entry.path().filename());
    }
    return names;
  }
  std::string kind_of(const std::string& step_folder) const {
    const auto shown = run({"checkpoint", "show", "--json", step_folder});
    return nlohmann::json::parse(shown.out)["kind"];
  }
};

// Of seven rows the fourth step has one for rank 0 and none for rank 1.
TEST_F(EndOfData, OnOneRankEndsAllAtTheSameStep) {
  write_rows("rows.jsonl", 7);
  for (const char* mode : {"disabled", "async"}) {
    fs::remove_all(path("run"));
    const auto result = train_rows("rows.jsonl", {"--ranks", "2", "--metrics.save_for_all_ranks",
                                                  "--checkpoint.async_mode", mode});
    ASSERT_EQ(result.status, 0) << result.err;
    EXPECT_THAT(result.err,
                HasSubstr("the data ends: rank 1 has not the rows of step 4, so step 3 of 100 is "
                          "the last one for all; 1 of 7 rows are left out"));
    EXPECT_EQ(metrics().size(), 3u);
    const std::string other = slurp(path("run/metrics.rank-1.jsonl"));
    EXPECT_EQ(std::count(other.begin(), other.end(), '\n'), 3);
    EXPECT_TRUE(metrics().back().contains("validation_loss"));  // the last step has it
    EXPECT_THAT(checkpoints(), ElementsAre("step-2", "step-3"));
    EXPECT_EQ(kind_of("run/checkpoint/step-3"), "model_only");
    EXPECT_EQ(run({"checkpoint", "verify", "run/checkpoint/step-3"}).status, 0);
  }
}

TEST_F(EndOfData, SavesTheLastStepAsTheJobSaysAndMoreDataGoesOnFromIt) {
  write_rows("rows.jsonl", 7);
  const Words full = {"--ranks", "2", "--checkpoint.no_last_save_model_only",
                      "--checkpoint.interval", "3"};
  ASSERT_EQ(train_rows("rows.jsonl", full).status, 0);
  EXPECT_EQ(kind_of("run/checkpoint/step-3"), "full");
  const auto again = train_rows("rows.jsonl", full);
  EXPECT_EQ(again.status, 0) << again.err;
  EXPECT_THAT(again.err, AllOf(HasSubstr("resumed from run/checkpoint/step-3"),
                               HasSubstr("step 3 of 100 is the last one")));
  EXPECT_EQ(metrics().size(), 3u);
  // What the last step leaves behind beside the checkpoint that is there is made now.
  const auto in_hf = train_rows("rows.jsonl", {"--ranks", "2", "--checkpoint.last_save_in_hf"});
  EXPECT_EQ(in_hf.status, 0) << in_hf.err;
  EXPECT_THAT(in_hf.err, HasSubstr("step 3 stays as it is saved"));
  EXPECT_THAT(checkpoints(), ElementsAre("step-3", "step-3-hf"));
  EXPECT_TRUE(fs::exists(path("run/checkpoint/step-3-hf/config.json")));
  EXPECT_EQ(kind_of("run/checkpoint/step-3"), "full");
  const auto elsewhere =
      train_rows("rows.jsonl", {"--ranks", "2", "--job.dump_folder", "elsewhere",
                                "--checkpoint.initial_load_path", "run/checkpoint/step-3",
                                "--checkpoint.no_initial_load_model_only"});
  EXPECT_EQ(elsewhere.status, 0) << elsewhere.err;
  EXPECT_EQ(kind_of("elsewhere/checkpoint/step-3"), "model_only");
  fs::remove_all(path("run/checkpoint/step-3-hf"));
  write_rows("rows.jsonl", 12);
  const auto more = train_rows("rows.jsonl", full);
  EXPECT_EQ(more.status, 0) << more.err;
  EXPECT_EQ(metrics().size(), 6u);
  EXPECT_THAT(checkpoints(), ElementsAre("step-3", "step-6"));
}

TEST_F(EndOfData, ThatComesAfterTheLastStepIsNotTold) {
  write_rows("rows.jsonl", 6);
  const auto result = train_rows("rows.jsonl", {"--ranks", "2", "--training.steps", "3"});
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.err, Not(HasSubstr("the data ends")));
  EXPECT_EQ(metrics().size(), 3u);
}

TEST_F(EndOfData, BeforeTheFirstStepIsAMistakeOfTheJob) {
  write_rows("rows.jsonl", 1);
  expect_user_error(train_rows("rows.jsonl", {"--ranks", "2"}),
                    {"training.repeat", "rank 1 has not the rows of a single step",
                     "the data has 1 and a step takes 2"});
}

// Documents packed in an order of their own: one pass has each token once, the last row padded.
TEST_F(EndOfData, OfTextEndsAfterOnePass) {
  const auto result =
      train({"--training.no_repeat", "--training.steps", "1000", "--checkpoint.no_enable"});
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.err, HasSubstr("the data ends: rank 0 has not the rows of step"));
}

}  // namespace
}  // namespace longhaul::test
