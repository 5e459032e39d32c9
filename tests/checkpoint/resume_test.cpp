// Which checkpoint a run resumes from, and which are deleted.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "longhaul/base/fault.h"
#include "longhaul/checkpoint/checkpoint.h"
#include "longhaul/checkpoint/manifest.h"
#include "tests/checkpoint/snapshots.h"
#include "tests/support/log_capture.h"
#include "tests/support/temp_folder.h"

namespace longhaul::checkpoint {
namespace {

using test::error_of;
using test::LogCapture;
using test::TempFolder;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

std::vector<int64_t> steps_in(const fs::path& folder) {
  std::vector<int64_t> steps;
  for (const auto& step : list_steps(folder)) steps.push_back(step.step);
  return steps;
}

void truncate_shard(const fs::path& step) {
  const fs::path shard = step / "model-00001.safetensors";
  fs::resize_file(shard, fs::file_size(shard) - 8);
}

// Sizes do not show it.
void flip_last_byte(const fs::path& step) {
  const fs::path shard = step / "model-00001.safetensors";
  test::flip_byte(shard, fs::file_size(shard) - 1);
}

TEST(Resume, OnlyWholeNamesCount) {
  const TempFolder folder;
  for (const std::string name :
       {"step-3", "step-20", "step-0", "step-007", "step-100.backup", "foo-step-200", "step-",
        "step-x", "step--1", "step-99999999999999999999", "Step-5", ".step-6.tmp-1", "step-5 "}) {
    fs::create_directory(folder / name);
  }
  test::spill(folder / "step-40", "a file, no folder");
  EXPECT_THAT(steps_in(folder.path()), ElementsAre(20, 3, 0));
  EXPECT_TRUE(list_steps(folder / "missing").empty());
}

// pytorch/torchtitan 4292.
TEST(Resume, OddNamesAndDamagedCheckpointsArePassedOver) {
  const TempFolder folder;
  save(folder.path(), make_snapshot(90));
  fs::remove(folder / "step-90/manifest.json");
  save(folder.path(), make_snapshot(100));
  fs::copy(folder / "step-100", folder / "step-100.backup", fs::copy_options::recursive);
  fs::copy(folder / "step-100", folder / "foo-step-200", fs::copy_options::recursive);
  save(folder.path(), make_snapshot(110));
  truncate_shard(folder / "step-110");

  const LogCapture log;
  EXPECT_EQ(find_resumable(folder.path()), folder / "step-100");
  EXPECT_THAT(log.text(), AllOf(HasSubstr("step-110': '"), HasSubstr("truncated"),
                                HasSubstr("step-90': '"), HasSubstr("no manifest.json")));
  EXPECT_THAT(log.text(), AllOf(Not(HasSubstr("backup")), Not(HasSubstr("foo"))));

  purge(folder.path(), {.keep_latest_k = 2, .saved_step = 110});
  save(folder.path(), make_snapshot(120));
  purge(folder.path(), {.keep_latest_k = 2, .saved_step = 120});
  save(folder.path(), make_snapshot(130));
  purge(folder.path(), {.keep_latest_k = 2, .saved_step = 130});
  EXPECT_THAT(steps_in(folder.path()), ElementsAre(130, 120, 90));
  EXPECT_TRUE(fs::exists(folder / "step-100.backup/manifest.json"));
  EXPECT_TRUE(fs::exists(folder / "foo-step-200/manifest.json"));
}

TEST(Resume, NothingToResumeFrom) {
  const TempFolder folder;
  EXPECT_EQ(find_resumable(folder.path()), std::nullopt);
  EXPECT_EQ(find_resumable(folder / "missing"), std::nullopt);
  save(folder.path(), make_snapshot(1));
  truncate_shard(folder / "step-1");
  const LogCapture log;
  EXPECT_EQ(find_resumable(folder.path()), std::nullopt);
  EXPECT_THAT(log.text(), HasSubstr("none of the 1 checkpoints in"));
}

TEST(Resume, FlippedByteInTheNewestMeansTheNextOlder) {
  const TempFolder folder;
  save(folder.path(), make_snapshot(1));
  save(folder.path(), make_snapshot(2));
  const auto entry = read_manifest(folder / "step-2").tensors.at("model.fp64");
  test::flip_byte(folder / ("step-2/" + entry.extent.file),
                  static_cast<size_t>(entry.extent.begin));
  const LogCapture log;
  EXPECT_EQ(find_resumable(folder.path()), folder / "step-1");
  EXPECT_THAT(log.text(), AllOf(HasSubstr("step-2"), HasSubstr("tensor 'model.fp64'")));
}

TEST(Resume, ModelOnlyIsNeverResumedFrom) {
  const TempFolder folder;
  save(folder.path(), make_snapshot(1));
  save(folder.path(), make_snapshot(2, true));
  const LogCapture log;
  EXPECT_EQ(find_resumable(folder.path()), folder / "step-1");
  EXPECT_THAT(log.text(), AllOf(HasSubstr("step-2"), HasSubstr("model only")));
  EXPECT_THAT(error_of<UserError>([&] { find_resumable(folder.path(), 2); }),
              AllOf(HasSubstr("step-2' cannot be resumed from"), HasSubstr("model only")));
}

TEST(Resume, WeightsMayComeFromAModelOnlyOne) {
  const TempFolder folder;
  EXPECT_EQ(find_weights(folder.path()), std::nullopt);
  save(folder.path(), make_snapshot(1));
  save(folder.path(), make_snapshot(2, true));
  save(folder.path(), make_snapshot(3, true));
  EXPECT_EQ(find_weights(folder.path()), folder / "step-3");
  truncate_shard(folder / "step-3");
  const LogCapture log;
  EXPECT_EQ(find_weights(folder.path()), folder / "step-2");
  EXPECT_THAT(log.text(), AllOf(HasSubstr("step-3"), HasSubstr("truncated")));
}

TEST(Resume, LoadStepIsThatOneOrAnError) {
  const TempFolder folder;
  for (const int step : {1, 2, 3}) save(folder.path(), make_snapshot(step));
  EXPECT_EQ(find_resumable(folder.path(), 2), folder / "step-2");
  truncate_shard(folder / "step-2");
  EXPECT_THAT(error_of<UserError>([&] { find_resumable(folder.path(), 2); }),
              AllOf(HasSubstr("step-2' cannot be resumed from"), HasSubstr("truncated")));
  EXPECT_THAT(error_of<UserError>([&] { find_resumable(folder.path(), 7); }),
              AllOf(HasSubstr("step-7' does not exist"), HasSubstr("there are: 3, 2, 1")));
  EXPECT_THAT(error_of<UserError>([&] { find_resumable(folder / "missing", 7); }),
              HasSubstr("there are: none"));
}

TEST(Resume, RenamedFolderIsNotTrusted) {
  const TempFolder folder;
  save(folder.path(), make_snapshot(1));
  fs::copy(folder / "step-1", folder / "step-9", fs::copy_options::recursive);
  const LogCapture log;
  EXPECT_EQ(find_resumable(folder.path()), folder / "step-1");
  EXPECT_THAT(log.text(), HasSubstr("its manifest says step 1"));
}

// What is not compared is not seen; presence, sizes and headers are looked at in any case.
TEST(Resume, WithoutChecksumsOnlyTheContentsAreTrusted) {
  const TempFolder folder;
  for (const int step : {1, 2, 3}) save(folder.path(), make_snapshot(step));
  flip_last_byte(folder / "step-3");
  const LogCapture log;
  EXPECT_EQ(find_resumable(folder.path(), -1, /*verify=*/false), folder / "step-3");
  EXPECT_EQ(find_resumable(folder.path(), 3, /*verify=*/false), folder / "step-3");
  EXPECT_EQ(find_weights(folder.path(), /*verify=*/false), folder / "step-3");
  EXPECT_EQ(log.text(), "");
  EXPECT_EQ(find_resumable(folder.path()), folder / "step-2");
  EXPECT_THAT(error_of<UserError>([&] { find_resumable(folder.path(), 3); }),
              HasSubstr("does not match its checksum"));
  // The name of a tensor in the header.
  const std::string shard = test::slurp(folder / "step-3/model-00001.safetensors");
  test::flip_byte(folder / "step-3/model-00001.safetensors", shard.find("model.bf16"));
  EXPECT_EQ(find_resumable(folder.path(), -1, /*verify=*/false), folder / "step-2");
  truncate_shard(folder / "step-2");
  EXPECT_EQ(find_resumable(folder.path(), -1, /*verify=*/false), folder / "step-1");
}

TEST(Purge, FiftySavesLeaveTwo) {
  const TempFolder folder;
  for (int step = 1; step <= 50; ++step) {
    save(folder.path(), make_snapshot(step));
    purge(folder.path(), {.keep_latest_k = 2, .saved_step = step});
  }
  EXPECT_THAT(steps_in(folder.path()), ElementsAre(50, 49));
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path()), fs::directory_iterator()), 2);
  expect_same(load(folder / "step-49"), make_snapshot(49));
}

TEST(Purge, ZeroKeepsAll) {
  const TempFolder folder;
  for (const int step : {1, 2, 3}) save(folder.path(), make_snapshot(step));
  purge(folder.path(), {.keep_latest_k = 0, .saved_step = 3});
  EXPECT_THAT(steps_in(folder.path()), ElementsAre(3, 2, 1));
}

TEST(Purge, ModelOnlyIsNeitherCountedNorDeleted) {
  const TempFolder folder;
  for (const int step : {1, 3, 5}) save(folder.path(), make_snapshot(step));
  for (const int step : {2, 4, 6}) save(folder.path(), make_snapshot(step, true));
  purge(folder.path(), {.keep_latest_k = 1, .saved_step = 6});
  EXPECT_THAT(steps_in(folder.path()), ElementsAre(6, 5, 4, 2));
}

TEST(Purge, DamagedOnesDoNotCountSoAUsableOneStays) {
  const TempFolder folder;
  for (const int step : {1, 2, 3, 4}) save(folder.path(), make_snapshot(step));
  truncate_shard(folder / "step-4");
  truncate_shard(folder / "step-3");
  truncate_shard(folder / "step-1");
  purge(folder.path(), {.keep_latest_k = 1, .saved_step = 4});
  EXPECT_THAT(steps_in(folder.path()), ElementsAre(4, 3, 2));
  EXPECT_EQ(find_resumable(folder.path()), folder / "step-2");
}

// A checkpoint that the run has passed over for a flipped byte looks whole to a look at sizes.
TEST(Purge, WhatTheRunPassedOverIsNeitherCountedNorDeleted) {
  const TempFolder folder;
  for (const int step : {200, 300}) save(folder.path(), make_snapshot(step));
  flip_last_byte(folder / "step-300");
  ASSERT_EQ(find_resumable(folder.path()), folder / "step-200");
  EXPECT_THAT(find_later_steps(folder.path(), 200), ElementsAre(300));
  save(folder.path(), make_snapshot(210));
  purge(folder.path(), {.keep_latest_k = 1, .saved_step = 210});
  EXPECT_THAT(steps_in(folder.path()), ElementsAre(300, 210));
  EXPECT_EQ(find_resumable(folder.path()), folder / "step-210");
  // Also when the run has gone beyond it.
  for (const int step : {305, 310}) save(folder.path(), make_snapshot(step));
  purge(folder.path(), {.keep_latest_k = 3, .saved_step = 310, .others = {300}});
  EXPECT_THAT(steps_in(folder.path()), ElementsAre(310, 305, 300, 210));
  purge(folder.path(), {.keep_latest_k = 2, .saved_step = 310, .others = {300}});
  EXPECT_THAT(steps_in(folder.path()), ElementsAre(310, 305, 300));
}

TEST(Purge, ACopyUnderAnotherNameIsNeitherCountedNorDeleted) {
  const TempFolder folder;
  save(folder.path(), make_snapshot(1));
  fs::copy(folder / "step-1", folder / "step-9", fs::copy_options::recursive);
  EXPECT_TRUE(find_later_steps(folder.path(), 1).empty());
  save(folder.path(), make_snapshot(10));
  purge(folder.path(), {.keep_latest_k = 2, .saved_step = 10});
  EXPECT_THAT(steps_in(folder.path()), ElementsAre(10, 9, 1));
  purge(folder.path(), {.keep_latest_k = 1, .saved_step = 10});
  EXPECT_THAT(steps_in(folder.path()), ElementsAre(10, 9));
}

// Older ones are deleted while the next save begins, which clears away what is left by the dead.
TEST(Purge, ASaveBesideItLeavesWhatIsBeingDeleted) {
  if (!fault::kCompiledIn) GTEST_SKIP() << "no fault points";
  const TempFolder folder;
  for (const int step : {1, 2}) save(folder.path(), make_snapshot(step));
  const fs::path hidden = temporary_name(folder / "step-1");
  std::thread purging;
  {
    const fault::Armed armed("checkpoint.purged:wait");
    purging = std::thread([&] { purge(folder.path(), {.keep_latest_k = 1, .saved_step = 2}); });
    while (!fs::exists(hidden)) std::this_thread::yield();
    save(folder.path(), make_snapshot(3));
    EXPECT_TRUE(fs::exists(hidden));
  }
  purging.join();
  EXPECT_THAT(steps_in(folder.path()), ElementsAre(3, 2));
  EXPECT_FALSE(fs::exists(hidden));
}

TEST(Purge, OneThatCannotBeDeletedIsNamedAndTheOthersGo) {
  if (!fault::kCompiledIn) GTEST_SKIP() << "built with LONGHAUL_FAULTS=OFF";
  const TempFolder folder;
  for (const int step : {1, 2, 3}) save(folder.path(), make_snapshot(step));
  const LogCapture log;
  const fault::Armed armed("checkpoint.purge:1:enospc");
  purge(folder.path(), {.keep_latest_k = 1, .saved_step = 3});
  EXPECT_THAT(steps_in(folder.path()), ElementsAre(3, 2));
  EXPECT_THAT(log.text(), HasSubstr("step-2' is not deleted: No space left on device"));
}

}  // namespace
}  // namespace longhaul::checkpoint
