// `compare` and `report`, and what a run leaves for other tools.
#include "tests/cli/small_job.h"

namespace longhaul {
namespace {

using nlohmann::json;
using test::slurp;
using test::Words;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

using ResultsCommand = test::SmallJob;

TEST_F(ResultsCommand, CompareTellsARunFromTheSameOneAndFromAnother) {
  expect_trained(train_only());
  expect_trained(train_only({"--job.dump_folder", "same"}));
  expect_trained(train_only({"--job.dump_folder", "other", "--optimizer.lr", "2e-3"}));
  const auto same = run({"compare", "run", "same"});
  EXPECT_EQ(same.status, 0) << same.err;
  EXPECT_THAT(same.out, AllOf(HasSubstr("lm_loss"), HasSubstr("the same, bit for bit")));
  // The first step's loss does not know its learning rate.
  const auto other = run({"compare", "run", "other"});
  test::expect_user_error(other, {"the runs differ: first in lr at step 1"}, 1);
  EXPECT_THAT(other.out, HasSubstr("grad_norm"));
  test::expect_user_error(run({"compare", "run", "same", "--steps", "7"}),
                          {"has 6 of the first 7 steps"});
  test::expect_user_error(run({"compare", "run", "corpus"}), {"holds no metrics.jsonl"});
  test::expect_user_error(run({"compare", "run", "same", "--rtol", "-1"}), {"--rtol -1"});
}

TEST_F(ResultsCommand, ReportWritesAPage) {
  expect_trained(train_only({"--metrics.indexer_recall_freq", "2"}));
  const auto result = run({"report", "run"});
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_EQ(result.out, "run/report.html\n");
  EXPECT_THAT(slurp(path("run/report.html")),
              AllOf(StartsWith("<!doctype html>"), HasSubstr("indexer_recall"),
                    HasSubstr("expert_load"), HasSubstr("cpu_cores"), HasSubstr("dump_folder")));
  EXPECT_EQ(run({"report", "run", "run", "--output", "both.html"}).status, 0);
  EXPECT_TRUE(fs::exists(path("both.html")));
  test::expect_user_error(run({"report", "none"}), {"'none' is not a folder"});
}

TEST_F(ResultsCommand, ARunThatGoesOnLeavesOneHistory) {
  const Words wanted = {"--metrics.enable_tensorboard", "--metrics.enable_wandb",
                        "--checkpoint.last_save_model_only", "false"};
  Words first = wanted;
  first.insert(first.end(), {"--training.steps", "3"});
  expect_trained(train(first));
  expect_trained(train(wanted));
  std::ifstream history(path("run/wandb-history.jsonl"));
  int64_t steps = 0;
  for (std::string line; std::getline(history, line);) {
    EXPECT_EQ(json::parse(line)["_step"], ++steps);
  }
  EXPECT_EQ(steps, 6);
  const auto files = fs::directory_iterator(path("run/tb"));
  EXPECT_EQ(std::distance(begin(files), end(files)), 2);
}

}  // namespace
}  // namespace longhaul
