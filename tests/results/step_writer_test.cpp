#include "longhaul/train/results/step_writer.h"

#include "longhaul/config/load.h"
#include "tests/results/run_folder.h"

namespace longhaul::train {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

JobConfig job_in(const fs::path& folder, const Strings& more = {}) {
  Strings words = {"--job.dump_folder", folder.string(), "--metrics.log_freq", "2"};
  words.insert(words.end(), more.begin(), more.end());
  return parse_job("", "job.toml", words);
}

void write_steps(const JobConfig& config, int64_t first, int64_t last) {
  StepWriter writer(config, {.metrics_file = "metrics.jsonl", .last_step = first - 1});
  for (int64_t step = first; step <= last; ++step) writer.append(test::small_step(step));
}

int count_of(const std::string& what, const std::string& text) {
  int count = 0;
  for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++count;
  return count;
}

// All event files of a folder, one after another.
std::string events_in(const fs::path& folder) {
  std::string bytes;
  for (const auto& entry : fs::directory_iterator(folder)) bytes += test::slurp(entry.path());
  return bytes;
}

TEST(StepWriter, OnlyWhatTheJobWants) {
  const test::TempFolder folder;
  write_steps(job_in(folder / "run"), 1, 2);
  EXPECT_TRUE(fs::exists(folder / "run/metrics.jsonl"));
  EXPECT_FALSE(fs::exists(folder / "run/tb"));
  EXPECT_FALSE(fs::exists(folder / "run/wandb-history.jsonl"));
}

TEST(StepWriter, EventsOfTheStepsThatAreLogged) {
  const test::TempFolder folder;
  auto config = job_in(folder / "run",
                       {"--metrics.enable_tensorboard", "--metrics.save_tb_folder", "events"});
  {
    StepWriter writer(config, {});
    for (int64_t step = 1; step <= 5; ++step) {
      auto metrics = test::small_step(step);
      metrics.indexer_recall_per_layer.clear();
      writer.append(metrics);
    }
  }
  const std::string bytes = events_in(folder / "run/events");
  EXPECT_EQ(count_of("loss/lm", bytes), 3);       // steps 1, 2 and 4
  EXPECT_THAT(bytes, HasSubstr("log_freq = 2"));  // the job
  for (const char* tag :
       {"loss/total", "loss/mtp", "loss/indexer", "loss/balance", "grad_norm", "throughput/mfu",
        "memory/peak_gib", "indexer_loss/layer_1", "expert_load_max/layer_1", "seconds/forward"}) {
    EXPECT_EQ(count_of(tag, bytes), 3) << tag;
  }
}

TEST(StepWriter, AStepWithRecallOrValidationIsAnEventOfItsOwn) {
  const test::TempFolder folder;
  const auto config = job_in(folder / "run", {"--metrics.enable_tensorboard"});
  StepWriter writer(config, {});
  auto metrics = test::small_step(3);  // log_freq is 2
  writer.append(metrics);
  metrics.step = 5;
  metrics.indexer_recall_per_layer.clear();
  metrics.validation = ValidationResult{.loss = 2.5, .labels = 10, .bits_per_byte = {}};
  writer.append(metrics);
  const std::string bytes = events_in(folder / "run/tb");
  EXPECT_EQ(count_of("indexer_recall/layer_0", bytes), 1);
  EXPECT_EQ(count_of("validation/loss", bytes), 1);
}

TEST(StepWriter, ARunThatGoesOnCutsBackWhatItRepeats) {
  const test::TempFolder folder;
  const auto config =
      job_in(folder / "run", {"--metrics.enable_wandb", "--metrics.enable_tensorboard"});
  write_steps(config, 1, 4);
  write_steps(config, 3, 5);  // from a checkpoint of step 2
  EXPECT_EQ(read_metrics(folder / "run/metrics.jsonl").size(), 5u);
  const auto history = read_metrics(folder / "run/wandb-history.jsonl", "_step");
  ASSERT_EQ(history.size(), 5u);
  EXPECT_EQ(history[4]["_step"], 5);
  EXPECT_EQ(history[0]["loss/lm"], 4.5);
  EXPECT_EQ(history[0]["_timestamp"], 1.75e9 + 1);
}

TEST(StepWriter, TheLastSaveStandsInTheLastLine) {
  const test::TempFolder folder;
  const auto config =
      job_in(folder / "run", {"--metrics.enable_wandb", "--metrics.enable_tensorboard"});
  write_steps(config, 1, 2);
  {
    StepWriter writer(config, {.metrics_file = "metrics.jsonl", .last_step = 2});
    auto metrics = test::small_step(3);
    writer.append(metrics);
    metrics.seconds["checkpoint"] = 7;
    writer.add_last_save(metrics);
    writer.append(test::small_step(4));
  }
  const auto lines = read_metrics(folder / "run/metrics.jsonl");
  ASSERT_EQ(lines.size(), 4u);
  EXPECT_FALSE(lines[1]["seconds"].contains("checkpoint"));
  EXPECT_EQ(lines[2]["seconds"]["checkpoint"], 7);
  EXPECT_EQ(lines[2]["seconds"]["forward"], 0.25);
  EXPECT_EQ(lines[3]["step"], 4);
  const auto history = read_metrics(folder / "run/wandb-history.jsonl", "_step");
  ASSERT_EQ(history.size(), 4u);
  EXPECT_EQ(history[2]["seconds/checkpoint"], 7);
  EXPECT_EQ(count_of("seconds/checkpoint", events_in(folder / "run/tb")), 1);
}

TEST(StepWriter, ALaterRankHasAFolderOfItsOwn) {
  const test::TempFolder folder;
  const auto config =
      job_in(folder / "run", {"--metrics.enable_wandb", "--metrics.enable_tensorboard"});
  StepWriter writer(config, {.metrics_file = "metrics.rank-3.jsonl", .rank = 3});
  writer.append(test::small_step(1));
  EXPECT_TRUE(fs::exists(folder / "run/tb/rank_3"));
  EXPECT_TRUE(fs::exists(folder / "run/metrics.rank-3.jsonl"));
  EXPECT_FALSE(fs::exists(folder / "run/wandb-history.jsonl"));
}

TEST(StepWriter, WandbTakesNumbersThatAreNotFinite) {
  auto metrics = test::small_step(1);
  metrics.loss = NAN;
  metrics.grad_norm = -INFINITY;
  const auto line = wandb_line(metrics);
  EXPECT_EQ(line["loss/total"], "NaN");
  EXPECT_EQ(line["grad_norm"], "-Infinity");
}

}  // namespace
}  // namespace longhaul::train
