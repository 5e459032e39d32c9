// A run's saves, at once and in the background.
#include "longhaul/checkpoint/saver.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <map>
#include <memory>

#include "longhaul/base/fault.h"
#include "tests/checkpoint/ranks.h"
#include "tests/support/log_capture.h"
#include "tests/support/temp_folder.h"

namespace longhaul::checkpoint {
namespace {

using test::error_of;
using test::run_ranks;
using test::TempFolder;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

SaverOptions options(const TempFolder& folder, AsyncMode mode) {
  return {.folder = folder.path(), .keep_latest_k = 2, .mode = mode};
}

dtensor::Communicator alone(dtensor::World& world) {
  return dtensor::Communicator::alone("checkpoint", 0, world.log());
}

// Pinned memory needs a CUDA device; where there is none the mode works as the other.
TEST(Saver, SavesWhatWasThereWhenItWasAsked) {
  for (const auto mode : {AsyncMode::kCopy, AsyncMode::kPinned}) {
    const TempFolder folder;
    dtensor::World world = dtensor::World::single();
    Saver saver(options(folder, mode), alone(world), world.shared_log());
    for (const int step : {5, 6}) {
      Snapshot snapshot = make_snapshot(step);
      saver.save(snapshot);
      for (auto& [name, tensor] : snapshot.tensors) tensor.zero_();
    }
    saver.finish();
    for (const int step : {5, 6}) {
      expect_same(load(folder / fmt::format("step-{}", step)), make_snapshot(step));
    }
  }
}

TEST(Saver, RanksSaveInTheBackgroundTogether) {
  const Snapshot first = make_snapshot(1), second = make_snapshot(2);
  for (const auto mode : {AsyncMode::kCopy, AsyncMode::kPinned}) {
    const TempFolder folder;
    run_ranks(kRanks, [&](dtensor::World& world) {
      const auto training = world.make_group("training", {0, 1, 2, 3});
      Saver saver(options(folder, mode), all_of(world), world.shared_log());
      // The next step changes the parts as soon as the copy is made, at another time on each rank.
      const auto save_and_change = [&](const Snapshot& whole) {
        const Snapshot parts = spread(whole, training);
        saver.save(parts);
        for (const auto& [name, part] : parts.parts) at::Tensor(part.tensor).zero_();
      };
      save_and_change(first);
      // Training talks over its own group meanwhile.
      for (int i = 0; i < 50; ++i) training.barrier();
      save_and_change(second);
      saver.finish();
    });
    expect_same(load(folder / "step-1"), first);
    expect_same(load(folder / "step-2"), second);
  }
}

TEST(Saver, OlderOnesGoWhenANewerOneIsDurable) {
  for (const auto mode : {AsyncMode::kDisabled, AsyncMode::kCopy}) {
    const TempFolder folder;
    dtensor::World world = dtensor::World::single();
    Saver saver(options(folder, mode), alone(world), world.shared_log());
    for (const int step : {1, 2, 3, 4}) saver.save(make_snapshot(step));
    saver.finish();
    EXPECT_THAT(names_in(folder.path()), ElementsAre("step-3", "step-4"));
  }
}

TEST(Saver, OlderOnesStayForOneThatMayNotBeWorthGoingOnFrom) {
  for (const auto mode : {AsyncMode::kDisabled, AsyncMode::kCopy}) {
    const TempFolder folder;
    dtensor::World world = dtensor::World::single();
    Saver saver(options(folder, mode), alone(world), world.shared_log());
    for (const int step : {1, 2}) saver.save(make_snapshot(step));
    for (const int step : {3, 4}) saver.save(make_snapshot(step), /*keep_older=*/true);
    saver.finish();
    EXPECT_THAT(names_in(folder.path()), ElementsAre("step-1", "step-2", "step-3", "step-4"));
    saver.save(make_snapshot(5));
    saver.finish();
    EXPECT_THAT(names_in(folder.path()), ElementsAre("step-4", "step-5"));
  }
}

// The last save ends while the older ones of the save before are still being deleted.
TEST(Saver, NoDeletionIsLeftOutAtTheEnd) {
  if (!fault::kCompiledIn) GTEST_SKIP() << "built with LONGHAUL_FAULTS=OFF";
  for (const auto mode : {AsyncMode::kDisabled, AsyncMode::kCopy}) {
    const TempFolder folder;
    dtensor::World world = dtensor::World::single();
    Saver saver(options(folder, mode), alone(world), world.shared_log());
    auto slow = std::make_unique<fault::Armed>("checkpoint.purge:1:wait");
    for (const int step : {1, 2, 3, 4, 5}) saver.save(make_snapshot(step));
    // In the background, until the last save has ended.
    while (!fs::exists(folder / "step-5")) ::usleep(1000);
    EXPECT_EQ(saver.failure(), std::nullopt);
    slow.reset();
    saver.finish();
    EXPECT_THAT(names_in(folder.path()), ElementsAre("step-4", "step-5"));
  }
}

TEST(Saver, AFailureInTheBackgroundIsToldOnceAndTheOlderCheckpointStays) {
  if (!fault::kCompiledIn) GTEST_SKIP() << "built with LONGHAUL_FAULTS=OFF";
  const TempFolder folder;
  dtensor::World world = dtensor::World::single();
  Saver saver(options(folder, AsyncMode::kCopy), alone(world), world.shared_log());
  saver.save(make_snapshot(1));
  saver.save(make_snapshot(2));
  saver.finish();
  {
    const fault::Armed armed("checkpoint.manifest:1:enospc");
    saver.save(make_snapshot(3));
    std::optional<std::string> failure;
    while (!failure) failure = saver.failure();
    EXPECT_THAT(*failure, HasSubstr("cannot save step 3"));
  }
  EXPECT_EQ(saver.failure(), std::nullopt);
  EXPECT_THAT(names_in(folder.path()), ElementsAre("step-1", "step-2"));
  saver.save(make_snapshot(4));
  saver.finish();
  EXPECT_THAT(names_in(folder.path()), ElementsAre("step-2", "step-4"));
}

TEST(Saver, AFailureThatNobodyAskedAboutEndsTheRun) {
  if (!fault::kCompiledIn) GTEST_SKIP() << "built with LONGHAUL_FAULTS=OFF";
  const TempFolder folder;
  dtensor::World world = dtensor::World::single();
  Saver saver(options(folder, AsyncMode::kCopy), alone(world), world.shared_log());
  const fault::Armed armed("checkpoint.shard:1:throw");
  saver.save(make_snapshot(1));
  EXPECT_THAT(error_of<UserError>([&] { saver.finish(); }), HasSubstr("checkpoint.shard"));
}

TEST(Saver, AnOlderFailureIsNoReasonToFailTheRun) {
  if (!fault::kCompiledIn) GTEST_SKIP() << "built with LONGHAUL_FAULTS=OFF";
  const TempFolder folder;
  dtensor::World world = dtensor::World::single();
  const test::LogCapture log;
  Saver saver(options(folder, AsyncMode::kCopy), alone(world), world.shared_log());
  {
    const fault::Armed armed("checkpoint.shard:1:throw");
    saver.save(make_snapshot(1));
    saver.save(make_snapshot(2));
  }
  saver.finish();
  EXPECT_THAT(log.text(), HasSubstr("could not be saved: fault injection"));
  EXPECT_THAT(names_in(folder.path()), ElementsAre("step-2"));
}

TEST(Saver, AFailureIsToldEvenIfTheRunEndsForAnotherReason) {
  if (!fault::kCompiledIn) GTEST_SKIP() << "built with LONGHAUL_FAULTS=OFF";
  const TempFolder folder;
  dtensor::World world = dtensor::World::single();
  const test::LogCapture log;
  const fault::Armed armed("checkpoint.shard:1:throw");
  {
    Saver saver(options(folder, AsyncMode::kCopy), alone(world), world.shared_log());
    saver.save(make_snapshot(1));
  }
  EXPECT_THAT(log.text(), HasSubstr("could not be saved: fault injection"));
}

TEST(Saver, APurgeThatFailsIsNoFailedSave) {
  if (!fault::kCompiledIn) GTEST_SKIP() << "built with LONGHAUL_FAULTS=OFF";
  for (const auto mode : {AsyncMode::kDisabled, AsyncMode::kCopy}) {
    const TempFolder folder;
    dtensor::World world = dtensor::World::single();
    const test::LogCapture log;
    Saver saver(options(folder, mode), alone(world), world.shared_log());
    const fault::Armed armed("checkpoint.purge:1:enospc");
    for (const int step : {1, 2, 3}) saver.save(make_snapshot(step));
    saver.finish();
    EXPECT_THAT(names_in(folder.path()), ElementsAre("step-1", "step-2", "step-3"));
    EXPECT_THAT(log.text(), HasSubstr("step-1' is not deleted"));
  }
}

// Of the run's own steps only the newest stay; what it has passed over is left to the user.
TEST(Saver, LeavesTheStepsOfAnotherHistoryAlone) {
  const TempFolder folder;
  for (const int step : {200, 300}) save(folder.path(), make_snapshot(step));
  dtensor::World world = dtensor::World::single();
  const test::LogCapture log;
  auto keep_one = options(folder, AsyncMode::kDisabled);
  keep_one.keep_latest_k = 1;
  Saver saver(keep_one, alone(world), world.shared_log());
  saver.goes_on_from(200);
  EXPECT_THAT(log.text(),
              HasSubstr("holds checkpoints after step 200, where this run goes on: 300"));
  saver.save(make_snapshot(210));
  saver.finish();
  EXPECT_THAT(names_in(folder.path()), ElementsAre("step-210", "step-300"));
  saver.save(make_snapshot(310));
  saver.finish();
  EXPECT_THAT(names_in(folder.path()), ElementsAre("step-300", "step-310"));
  // Saved again, it is the run's own.
  saver.save(make_snapshot(300));
  saver.save(make_snapshot(320));
  saver.finish();
  EXPECT_THAT(names_in(folder.path()), ElementsAre("step-320"));
}

// Its sizes are right, and nothing but its checksums tells.
TEST(Saver, TheOnlySoundOneIsNotDeletedForADamagedOne) {
  if (!fault::kCompiledIn) GTEST_SKIP() << "built with LONGHAUL_FAULTS=OFF";
  for (const auto mode : {AsyncMode::kDisabled, AsyncMode::kCopy}) {
    const TempFolder folder;
    dtensor::World world = dtensor::World::single();
    const test::LogCapture log;
    auto keep_one = options(folder, mode);
    keep_one.keep_latest_k = 1;
    Saver saver(keep_one, alone(world), world.shared_log());
    saver.save(make_snapshot(1));
    saver.finish();
    {
      const fault::Armed armed("file.write:1:flip");
      saver.save(make_snapshot(2));
      saver.finish();
    }
    EXPECT_THAT(names_in(folder.path()), ElementsAre("step-1", "step-2"));
    EXPECT_THAT(log.text(), HasSubstr("are not deleted"));
    EXPECT_EQ(find_resumable(folder.path()), folder / "step-1");
    saver.save(make_snapshot(3));
    saver.finish();
    EXPECT_THAT(names_in(folder.path()), ElementsAre("step-3"));
  }
}

// A step's time limit is no limit of the save beside it: here a rank takes a second for its share.
TEST(Saver, TheLimitOfStepsLeavesASaveAlone) {
  if (!fault::kCompiledIn) GTEST_SKIP() << "built with LONGHAUL_FAULTS=OFF";
  const TempFolder folder;
  const Snapshot snapshot = make_snapshot(1);
  const fault::Armed armed("checkpoint.shard:1:delay");
  run_ranks(kRanks, [&](dtensor::World& world) {
    const auto training = world.make_group("training", {0, 1, 2, 3});
    Saver saver(options(folder, AsyncMode::kCopy), all_of(world, 60'000), world.shared_log());
    saver.save(spread(snapshot, training));
    training.barrier();
    world.set_timeout(std::chrono::milliseconds(300));
    saver.finish();
  });
  expect_same(load(folder / "step-1"), snapshot);
}

// One rank is late until the others have given up, and so must it. Nobody saves with that group
// again.
TEST(Saver, RanksThatLoseOneAnotherEndTheRun) {
  if (!fault::kCompiledIn) GTEST_SKIP() << "built with LONGHAUL_FAULTS=OFF";
  for (const auto mode : {AsyncMode::kDisabled, AsyncMode::kCopy}) {
    const TempFolder folder;
    const Snapshot first = make_snapshot(1), second = make_snapshot(2);
    save(folder.path(), first);
    auto armed = std::make_unique<fault::Armed>("checkpoint.shard:1:wait");
    std::atomic<int> lost = 0, refused = 0, ended = 0;
    run_ranks(kRanks, [&](dtensor::World& world) {
      const auto training = world.make_group("training", {0, 1, 2, 3});
      auto ranks = all_of(world);
      Saver saver(options(folder, mode), ranks, world.shared_log());
      ranks.set_timeout(std::chrono::seconds(2));
      training.barrier();
      const std::string error = error_of<dtensor::CollectiveError>([&] {
        saver.save(spread(second, training));
        saver.finish();
      });
      if (++ended == kRanks - 1) armed.reset();
      lost += error.find("save 1 (step 2): the ranks have lost one another") != std::string::npos;
      refused += !error_of<Error>([&] { saver.save(second); }).empty();
    });
    EXPECT_EQ(lost, kRanks);
    EXPECT_EQ(refused, kRanks);
    // Others may still have written to it when the first rank gave up.
    EXPECT_THAT(names_in(folder.path()),
                ElementsAre(::testing::StartsWith(".step-2.tmp-"), "step-1"));
    save(folder.path(), second);
    EXPECT_THAT(names_in(folder.path()), ElementsAre("step-1", "step-2"));
  }
}

TEST(Saver, AThreadThatIsGivenUpKeepsWhatItsGroupNeeds) {
  if (!fault::kCompiledIn) GTEST_SKIP() << "built with LONGHAUL_FAULTS=OFF";
  for (const auto mode : {AsyncMode::kDisabled, AsyncMode::kCopy}) {
    const TempFolder folder;
    std::weak_ptr<dtensor::CollectiveLog> log;
    {
      dtensor::World world = dtensor::World::single();
      log = world.shared_log();
      auto hasty = options(folder, mode);
      hasty.timeout = std::chrono::milliseconds(100);
      const fault::Armed armed("checkpoint.tensor:3:hang");
      Saver saver(hasty, alone(world), world.shared_log());
      const std::string error = error_of<UserError>([&] {
        saver.save(make_snapshot(1));
        saver.finish();
      });
      EXPECT_THAT(error, HasSubstr("rank 0: save 1 (step 1): nothing was written to"));
    }
    EXPECT_FALSE(log.expired());
  }
}

TEST(Saver, CopiesAreMadeIntoTheSameMemory) {
  const Snapshot snapshot = make_snapshot(1);
  Snapshot staged = stage(snapshot);
  std::map<std::string, const void*> places;
  for (const auto& [name, tensor] : staged.tensors) places[name] = tensor.const_data_ptr();
  for (int step = 2; step < 52; ++step) {
    const Snapshot next = make_snapshot(step);
    staged = stage(next, {}, std::move(staged));
    for (const auto& [name, tensor] : staged.tensors) {
      ASSERT_EQ(tensor.const_data_ptr(), places.at(name)) << name;
      ASSERT_TRUE(at::equal(tensor, next.tensors.at(name))) << name;
    }
  }
}

TEST(Saver, AThreadThatHangsIsGivenUpWithRankSaveAndStep) {
  if (!fault::kCompiledIn) GTEST_SKIP() << "built with LONGHAUL_FAULTS=OFF";
  dtensor::World world = dtensor::World::single();
  for (const char* place : {"checkpoint.tensor:3", "file.sync:1", "checkpoint.manifest:1"}) {
    SCOPED_TRACE(place);
    const TempFolder folder;
    auto hasty = options(folder, AsyncMode::kCopy);
    hasty.timeout = std::chrono::milliseconds(100);
    Saver saver(hasty, alone(world), world.shared_log());
    saver.save(make_snapshot(1));
    saver.finish();
    const fault::Armed armed(std::string(place) + ":hang");
    saver.save(make_snapshot(2));
    EXPECT_THAT(error_of<UserError>([&] { saver.finish(); }),
                AllOf(HasSubstr("rank 0: save 2 (step 2): nothing was written"),
                      HasSubstr("raise comm.init_timeout_seconds")));
    EXPECT_EQ(find_resumable(folder.path()), folder / "step-1");
  }
}

// Another form of a step: the caller waits in any mode, and is told what went wrong.
TEST(Saver, WhatIsWrittenBesideHasTheSameLimit) {
  if (!fault::kCompiledIn) GTEST_SKIP() << "built with LONGHAUL_FAULTS=OFF";
  dtensor::World world = dtensor::World::single();
  for (const auto mode : {AsyncMode::kDisabled, AsyncMode::kCopy}) {
    const TempFolder folder;
    auto hasty = options(folder, mode);
    hasty.timeout = std::chrono::milliseconds(100);
    Saver saver(hasty, alone(world), world.shared_log());
    saver.save(make_snapshot(1));
    const fs::path file = folder / "beside";
    const auto write = [file](const SaveOptions& save) {
      FileWriter writer(file);
      writer.write("text");
      save.progress();
      writer.finish();
    };
    saver.write_beside(1, write);
    EXPECT_EQ(read_file(file), "text");
    EXPECT_EQ(find_resumable(folder.path()), folder / "step-1");
    EXPECT_EQ(error_of<UserError>(
                  [&] { saver.write_beside(1, [](const SaveOptions&) { fail_user("no room"); }); }),
              "no room");
    const fault::Armed armed("file.sync:1:hang");
    EXPECT_THAT(error_of<UserError>([&] { saver.write_beside(1, write); }),
                HasSubstr("rank 0: save 4 (step 1): nothing was written to"));
  }
}

int64_t resident_bytes() {
  std::ifstream in("/proc/self/statm");
  int64_t total = 0, resident = 0;
  in >> total >> resident;
  return resident * ::sysconf(_SC_PAGESIZE);
}

// A save that keeps anything of its copy, its buffers or its thread would need 45 times of it.
TEST(Saver, MemoryStaysFlatOverFiftySaves) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers keep freed memory";
#endif
  Snapshot snapshot;
  for (int i = 0; i < 4; ++i) {
    snapshot.tensors[fmt::format("model.{}", i)] = at::ones({512, 1024});
    snapshot.tensors[fmt::format("optimizer.{}", i)] = at::ones({512, 1024});
  }
  const int64_t bytes = 8 * 512 * 1024 * 4;
  for (const auto mode : {AsyncMode::kDisabled, AsyncMode::kCopy}) {
    const TempFolder folder;
    dtensor::World world = dtensor::World::single();
    Saver saver(options(folder, mode), alone(world), world.shared_log());
    int64_t before = 0;
    for (snapshot.step = 1; snapshot.step <= 50; ++snapshot.step) {
      saver.save(snapshot);
      if (snapshot.step == 5) before = resident_bytes();
    }
    saver.finish();
    EXPECT_LT(resident_bytes() - before, bytes / 2) << "of " << bytes << " a save";
  }
}

// What is allocated, in all threads' arenas; how much of those is resident depends on the threads.
int64_t allocated_bytes() {
  const auto info = ::mallinfo2();
  return static_cast<int64_t>(info.uordblks + info.hblkhd);
}

// The same of parts that go from rank to rank, of all ranks together: if each rank kept one of its
// parts of each save, they would be more than ten times the limit.
TEST(Saver, MemoryStaysFlatOverFiftySavesOfParts) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers keep freed memory";
#endif
  Snapshot whole;
  for (int i = 0; i < 3; ++i) {
    whole.tensors[fmt::format("model.{}", i)] = at::ones({512, 1024});
    whole.tensors[fmt::format("optimizer.{}", i)] = at::ones({512, 1024});
  }
  const int64_t bytes = 6 * 512 * 1024 * 4;
  for (const auto mode : {AsyncMode::kDisabled, AsyncMode::kCopy}) {
    const TempFolder folder;
    int64_t before = 0, after = 0;
    run_ranks(kRanks, [&](dtensor::World& world) {
      const auto training = world.make_group("training", {0, 1, 2, 3});
      Saver saver(options(folder, mode), all_of(world), world.shared_log());
      Snapshot snapshot = spread(whole, training);
      for (snapshot.step = 1; snapshot.step <= 50; ++snapshot.step) {
        saver.save(snapshot);
        if (snapshot.step != 5 && snapshot.step != 50) continue;
        saver.finish();
        training.barrier();
        if (training.rank() == 0) (snapshot.step == 5 ? before : after) = allocated_bytes();
        training.barrier();
      }
      saver.finish();
    });
    EXPECT_LT(after - before, bytes / 2) << "of " << bytes << " a save";
  }
}

}  // namespace
}  // namespace longhaul::checkpoint
