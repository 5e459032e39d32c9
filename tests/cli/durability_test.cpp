// Nothing that happens to the process or to its files loses work: killed at any point, disk full,
// checkpoints damaged. After it the same command gives the run that was never disturbed.
#include <sys/mount.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "longhaul/base/fault.h"
#include "tests/cli/small_job.h"

namespace longhaul {
namespace {

using test::Program;
using test::slurp;
using test::Words;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsSupersetOf;

class Durability : public test::SmallJob {
 protected:
  // What a run of six steps gives; the same in all tests of this file.
  const Words& undisturbed() {
    static Words lines;
    if (lines.empty()) {
      expect_trained(train({"--job.dump_folder", "undisturbed"}));
      lines = figures("undisturbed");
    }
    return lines;
  }
  void expect_goes_on_as_if_nothing_happened(const Words& more = {}) {
    expect_trained(train(more));
    EXPECT_EQ(figures(), undisturbed());
  }
  // A run that stands at step 5, with full checkpoints of steps 2 and 4.
  void run_until_step_five() {
    const auto result = train({}, {"LONGHAUL_FAULT=checkpoint.begin:3:kill"});
    ASSERT_EQ(result.killed_by, SIGKILL) << result.err;
    ASSERT_EQ(metrics().size(), 6u);
  }
  Words names_in(const std::string& folder) const {
    Words names;
    for (const auto& entry : fs::directory_iterator(path(folder))) {
      names.push_back(entry.path().filename());
    }
    return names;
  }
};

TEST_F(Durability, KilledInASave) {
  if (!fault::kCompiledIn) GTEST_SKIP() << "built with LONGHAUL_FAULTS=OFF";
  for (const char* place : {"checkpoint.tensor:1", "checkpoint.tensor:200", "checkpoint.renamed:1",
                            "checkpoint.done:3"}) {
    SCOPED_TRACE(place);
    fs::remove_all(path("run"));
    const auto result = train({}, {std::string("LONGHAUL_FAULT=") + place + ":kill"});
    EXPECT_EQ(result.killed_by, SIGKILL) << result.err;
    const auto next = train();
    EXPECT_EQ(next.status, 0) << next.err;
    EXPECT_EQ(figures(), undisturbed());
  }
}

// The Hugging Face folder that the end of a run leaves is complete or absent, too.
TEST_F(Durability, KilledInTheExport) {
  if (!fault::kCompiledIn) GTEST_SKIP() << "built with LONGHAUL_FAULTS=OFF";
  const Words job = {"--checkpoint.last_save_in_hf"};
  expect_trained(train({"--checkpoint.last_save_in_hf", "--job.dump_folder", "whole"}));
  for (const char* place : {"hf_folder.tensor:9", "hf_folder.rename:1"}) {
    SCOPED_TRACE(place);
    fs::remove_all(path("run"));
    const auto result = train(job, {std::string("LONGHAUL_FAULT=") + place + ":kill"});
    EXPECT_EQ(result.killed_by, SIGKILL) << result.err;
    EXPECT_FALSE(fs::exists(path("run/checkpoint/step-6-hf")));
    expect_goes_on_as_if_nothing_happened(job);
    EXPECT_THAT(names_in("run/checkpoint"),
                ::testing::UnorderedElementsAre("step-2", "step-4", "step-6", "step-6-hf"));
    EXPECT_EQ(run({"checkpoint", "diff", "whole/checkpoint/step-6-hf", "run/checkpoint/step-6-hf"})
                  .status,
              0);
  }
}

TEST_F(Durability, KilledBetweenSaves) {
  const Words job = {"--training.steps",      "200", "--training.seq_len", "16",
                     "--checkpoint.interval", "5",   "--validation.freq",  "50"};
  Words whole = job;
  whole.insert(whole.end(), {"--job.dump_folder", "whole"});
  Program undisturbed(train_words(whole), here());
  for (const char* reached : {"step-5", "step-15"}) {
    Program program(train_words(job), here());
    while (!fs::exists(path("run/checkpoint") / reached) && program.running()) {
      std::this_thread::yield();
    }
    program.signal(SIGKILL);
    EXPECT_EQ(program.wait().killed_by, SIGKILL);
  }
  expect_trained(train(job));
  expect_trained(undisturbed.wait());
  EXPECT_EQ(figures("run"), figures("whole"));
}

TEST_F(Durability, TwoRunsInOneFolder) {
  const Words job = {"--training.steps", "100000", "--training.seq_len", "16"};
  Program first(train_words(job), here());
  while (!fs::exists(path("run/metrics.jsonl")) && first.running()) std::this_thread::yield();
  expect_user_error(train(job), {"job.toml:2: job.dump_folder: another run is writing to 'run'"});
  first.signal(SIGKILL);
}

TEST_F(Durability, TwoRunsWithOneFolderOfCheckpoints) {
  Words job = {"--training.steps",    "100000", "--training.seq_len", "16", "--checkpoint.folder",
               path("saved").string()};
  Program first(train_words(job), here());
  while (!fs::exists(path("run/metrics.jsonl")) && first.running()) std::this_thread::yield();
  job.insert(job.end(), {"--job.dump_folder", "other"});
  expect_user_error(train(job), {"checkpoint.folder: another run is writing to"});
  first.signal(SIGKILL);
}

TEST_F(Durability, ATornLastLineOfTheMetrics) {
  run_until_step_five();
  std::ofstream(path("run/metrics.jsonl"), std::ios::app) << "{\"step\": 7, \"loss\": 5.8";
  expect_goes_on_as_if_nothing_happened();
}

TEST_F(Durability, ARunThatBeginsAnewKeepsTheOldMetrics) {
  expect_trained(train({"--checkpoint.no_enable"}));
  const std::string before = slurp(path("run/metrics.jsonl"));
  const auto again = train({"--checkpoint.no_enable"});
  expect_trained(again);
  EXPECT_THAT(again.err, HasSubstr("run/metrics.jsonl is from an earlier run"));
  EXPECT_EQ(slurp(path("run/metrics.jsonl.1")), before);
}

TEST_F(Durability, FullDiskBySwitch) {
  if (!fault::kCompiledIn) GTEST_SKIP() << "built with LONGHAUL_FAULTS=OFF";
  const auto result = train({}, {"LONGHAUL_FAULT=checkpoint.tensor:200:enospc"});
  expect_user_error(result, {"cannot save step 4 in 'run/checkpoint': no space left on device",
                             "free ", "or choose another checkpoint.folder"});
  EXPECT_THAT(names_in("run/checkpoint"), ::testing::ElementsAre("step-2"));
  expect_goes_on_as_if_nothing_happened();
}

// A file system of its own: two checkpoints fit, a third does not.
TEST_F(Durability, FullDisk) {
  fs::create_directory(path("run"));
  if (::mount("none", path("run").c_str(), "tmpfs", 0, "size=5m") != 0) {
    GTEST_SKIP() << "a tmpfs cannot be mounted here: " << std::strerror(errno);
  }
  const Words job = {"--checkpoint.no_last_save_model_only"};
  expect_user_error(train(job), {"cannot save step 6 in 'run/checkpoint': no space left on device",
                                 "free ", "or choose another checkpoint.folder"});
  EXPECT_EQ(run({"checkpoint", "verify", "run/checkpoint/step-4"}).status, 0);
  // No room yet: the same again, and step 4 stays.
  EXPECT_EQ(train(job).status, 2);
  EXPECT_EQ(run({"checkpoint", "verify", "run/checkpoint/step-4"}).status, 0);
  EXPECT_EQ(::mount("none", path("run").c_str(), "tmpfs", MS_REMOUNT, "size=20m"), 0);
  expect_goes_on_as_if_nothing_happened(job);
  ::umount2(path("run").c_str(), MNT_DETACH);
}

TEST_F(Durability, AFlippedByteTakesTheOlderCheckpoint) {
  run_until_step_five();
  const fs::path shard = path("run/checkpoint/step-4/model-00001.safetensors");
  test::flip_byte(shard, fs::file_size(shard) / 2);
  const auto result = train();
  expect_trained(result);
  EXPECT_THAT(result.err, AllOf(HasSubstr("passing over checkpoint 'run/checkpoint/step-4'"),
                                HasSubstr("resumed from run/checkpoint/step-2")));
  EXPECT_EQ(figures(), undisturbed());
}

// Of the same step as the run's last: neither is the run refused for it, nor is it lost.
TEST_F(Durability, WeightsAloneLeaveADamagedCheckpointOfTheirStep) {
  expect_trained(train({"--training.steps", "4", "--checkpoint.no_last_save_model_only"}));
  const fs::path shard = path("run/checkpoint/step-4/model-00001.safetensors");
  test::flip_byte(shard, fs::file_size(shard) / 2);
  const auto result = train({"--training.steps", "4"});
  expect_trained(result);
  EXPECT_THAT(result.err, AllOf(HasSubstr("resumed from run/checkpoint/step-2"),
                                HasSubstr("step-4, which this run has passed over, is now ")));
  EXPECT_THAT(names_in("run/checkpoint"),
              ::testing::UnorderedElementsAre("step-2", "step-4", "step-4.abandoned-1"));
  EXPECT_THAT(slurp(path("run/checkpoint/step-4/manifest.json")),
              HasSubstr("\"kind\": \"model_only\""));
  EXPECT_THAT(slurp(path("run/checkpoint/step-4.abandoned-1/manifest.json")),
              HasSubstr("\"kind\": \"full\""));
}

// The commands that look at the result do as training does, but take no other step than one that
// was asked for.
TEST_F(Durability, EvaluationAndGenerationTakeTheOlderCheckpoint) {
  run_until_step_five();
  const auto evaluate = [&](const char* step) {
    return run({"eval", "job.toml", "--json", "--checkpoint", step}).out;
  };
  const std::string newest = evaluate("run/checkpoint/step-4");
  const std::string older = evaluate("run/checkpoint/step-2");
  ASSERT_NE(newest, older);
  const fs::path shard = path("run/checkpoint/step-4/model-00001.safetensors");
  test::flip_byte(shard, fs::file_size(shard) / 2);
  const auto says_why = AllOf(HasSubstr("passing over checkpoint 'run/checkpoint/step-4': "),
                              HasSubstr("does not match its checksum"));
  for (const Words& place : {Words{}, Words{"--checkpoint", "run/checkpoint"}}) {
    Words words = {"eval", "job.toml", "--json"};
    words.insert(words.end(), place.begin(), place.end());
    const auto result = run(words);
    EXPECT_EQ(result.status, 0) << result.err;
    EXPECT_EQ(result.out, older);
    EXPECT_THAT(result.err, says_why);
  }
  const auto text = run({"generate", "job.toml", "--prompt", "the", "--max-new-tokens", "4"});
  EXPECT_EQ(text.status, 0) << text.err;
  EXPECT_THAT(text.err, says_why);
  for (const Words& words : {Words{"eval", "job.toml"}, Words{"generate", "job.toml"}}) {
    Words named = words;
    named.insert(named.end(), {"--checkpoint", "run/checkpoint/step-4"});
    expect_user_error(run(named), {"run/checkpoint/step-4", "does not match its checksum"});
  }
}

// A rate that throws the weights out of fp32's range: sound checkpoints must not be purged for it.
TEST_F(Durability, WeightsThatAreNotFiniteAreNotSaved) {
  expect_trained(train({"--training.steps", "2", "--checkpoint.no_last_save_model_only"}));
  const Words job = {
      "--optimizer.lr", "1e39", "--checkpoint.interval", "1", "--checkpoint.keep_latest_k", "1"};
  const auto result = train(job);
  expect_user_error(result, {"step 3 is not saved: ", "holds values that are not finite",
                             "an older checkpoint with a lower optimizer.lr"});
  EXPECT_THAT(names_in("run/checkpoint"), ::testing::ElementsAre("step-2"));
}

TEST_F(Durability, NoSoundCheckpointIsNoReasonToBeginAnew) {
  run_until_step_five();
  for (const char* step : {"step-2", "step-4"}) {
    fs::resize_file(path("run/checkpoint") / step / "model-00001.safetensors", 1000);
  }
  const std::string before = slurp(path("run/metrics.jsonl"));
  const auto result = train();
  expect_user_error(
      result, {"run/checkpoint: none of the checkpoints can be resumed from", "move them away"});
  EXPECT_THAT(result.err, AllOf(HasSubstr("passing over checkpoint 'run/checkpoint/step-4'"),
                                HasSubstr("passing over checkpoint 'run/checkpoint/step-2'")));
  EXPECT_EQ(slurp(path("run/metrics.jsonl")), before);
  EXPECT_EQ(run({"checkpoint", "verify", "run/checkpoint/step-4"}).status, 1);
  for (const Words& words :
       {Words{"eval", "job.toml"}, Words{"generate", "job.toml", "--prompt", "a"}}) {
    expect_user_error(run(words), {"run/checkpoint/step-4", "truncated"});
  }
}

TEST_F(Durability, AnotherModelIsNotResumedFrom) {
  run_until_step_five();
  const std::string before = slurp(path("run/metrics.jsonl"));
  expect_user_error(train({"--mtp.num_modules", "1"}),
                    {"checkpoint of step 4 does not fit the job's model", "is missing"});
  EXPECT_EQ(slurp(path("run/metrics.jsonl")), before);
  expect_goes_on_as_if_nothing_happened();
}

}  // namespace
}  // namespace longhaul
