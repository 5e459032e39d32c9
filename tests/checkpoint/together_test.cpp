// Ranks that save together, and saves in the background.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "longhaul/base/fault.h"
#include "longhaul/checkpoint/checkpoint_reader.h"
#include "longhaul/checkpoint/saver.h"
#include "tests/checkpoint/snapshots.h"
#include "tests/support/run_ranks.h"
#include "tests/support/temp_folder.h"

namespace longhaul::checkpoint {
namespace {

using test::error_of;
using test::run_ranks;
using test::TempFolder;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int kRanks = 4;

dtensor::Communicator all_of(dtensor::World& world) {
  std::vector<int> ranks(world.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  return world.make_group("checkpoint", ranks);
}

// The same snapshot as the test's, of which only the first rank has the contents: every fetch is a
// broadcast.
Snapshot spread(const Snapshot& whole, const dtensor::Communicator& ranks) {
  Snapshot snapshot = whole;
  for (auto& [name, tensor] : snapshot.tensors) {
    tensor = at::empty(tensor.sizes(), tensor.options().device(at::kMeta));
  }
  snapshot.fetch = [&whole, &ranks](const std::string& name) {
    const at::Tensor& of = whole.tensors.at(name);
    at::Tensor tensor =
        ranks.rank() == 0 ? of.contiguous().clone() : at::zeros_like(of.contiguous());
    ranks.broadcast(tensor, 0).wait();
    return tensor;
  };
  return snapshot;
}

TEST(Together, RanksWriteSharesOfOneCheckpoint) {
  const TempFolder folder;
  const Snapshot whole = make_snapshot(7);
  run_ranks(kRanks, [&](dtensor::World& world) {
    const auto ranks = all_of(world);
    EXPECT_EQ(save(folder.path(), spread(whole, ranks), {.ranks = &ranks}), folder / "step-7");
  });
  expect_same(load(folder / "step-7"), whole);
  EXPECT_GE(read_manifest(folder / "step-7").files.size(), size_t{kRanks});
  EXPECT_THAT(names_in(folder.path()), ElementsAre("step-7"));
}

TEST(Together, TheContentsAreThoseOfOneRanksCheckpoint) {
  const TempFolder folder;
  const Snapshot whole = make_snapshot(7);
  save(folder / "one", whole);
  run_ranks(3, [&](dtensor::World& world) {
    const auto ranks = all_of(world);
    save(folder / "three", spread(whole, ranks), {.ranks = &ranks});
  });
  const CheckpointReader one(folder / "one/step-7"), three(folder / "three/step-7");
  ASSERT_EQ(one.names(), three.names());
  for (const auto& name : one.names()) EXPECT_EQ(one.checksum(name), three.checksum(name)) << name;
}

TEST(Together, AFailureOnOneRankFailsOnAllAndLeavesNothing) {
  if (!fault::kCompiledIn) GTEST_SKIP() << "built with LONGHAUL_FAULTS=OFF";
  for (const char* place : {"checkpoint.begin:1", "checkpoint.tensor:1", "checkpoint.tensor:14",
                            "checkpoint.shard:2", "checkpoint.manifest:1", "file.sync:3"}) {
    SCOPED_TRACE(place);
    const TempFolder folder;
    save(folder.path(), make_snapshot(1));
    const Snapshot whole = make_snapshot(2);
    const fault::Armed armed(std::string(place) + ":enospc");
    std::mutex mutex;
    std::vector<std::string> errors;
    run_ranks(kRanks, [&](dtensor::World& world) {
      const auto ranks = all_of(world);
      const std::string error = error_of<UserError>(
          [&] { save(folder.path(), spread(whole, ranks), {.ranks = &ranks}); });
      const std::lock_guard lock(mutex);
      errors.push_back(error);
    });
    ASSERT_EQ(errors.size(), size_t{kRanks});
    int told = 0;
    for (const auto& error : errors) {
      EXPECT_THAT(error, HasSubstr("no space left on device"));
      told += error.starts_with("rank ");
    }
    EXPECT_EQ(told, kRanks - 1) << "all but the one that failed name it";
    EXPECT_THAT(names_in(folder.path()), ElementsAre("step-1"));
  }
}

// --- in the background --------------------------------------------------------------------------

SaverOptions options(const TempFolder& folder, AsyncMode mode) {
  return {.folder = folder.path(), .keep_latest_k = 2, .mode = mode};
}

dtensor::Communicator alone(dtensor::World& world) {
  return dtensor::Communicator::alone("checkpoint", 0, world.log());
}

TEST(Saver, SavesWhatWasThereWhenItWasAsked) {
  const TempFolder folder;
  dtensor::World world = dtensor::World::single();
  Saver saver(options(folder, AsyncMode::kCopy), alone(world));
  Snapshot snapshot = make_snapshot(5);
  saver.save(snapshot);
  for (auto& [name, tensor] : snapshot.tensors) tensor.zero_();
  saver.finish();
  expect_same(load(folder / "step-5"), make_snapshot(5));
}

TEST(Saver, RanksSaveInTheBackgroundTogether) {
  const TempFolder folder;
  const Snapshot first = make_snapshot(1), second = make_snapshot(2);
  run_ranks(kRanks, [&](dtensor::World& world) {
    const auto training = world.make_group("training", {0, 1, 2, 3});
    Saver saver(options(folder, AsyncMode::kCopy), all_of(world));
    saver.save(spread(first, training));
    // Training talks over its own group meanwhile.
    for (int i = 0; i < 50; ++i) training.barrier();
    saver.save(spread(second, training));
    saver.finish();
  });
  expect_same(load(folder / "step-1"), first);
  expect_same(load(folder / "step-2"), second);
}

TEST(Saver, OlderOnesGoWhenANewerOneIsDurable) {
  for (const auto mode : {AsyncMode::kDisabled, AsyncMode::kCopy}) {
    const TempFolder folder;
    dtensor::World world = dtensor::World::single();
    Saver saver(options(folder, mode), alone(world));
    for (const int step : {1, 2, 3, 4}) saver.save(make_snapshot(step));
    saver.finish();
    EXPECT_THAT(names_in(folder.path()), ElementsAre("step-3", "step-4"));
  }
}

TEST(Saver, AFailureInTheBackgroundIsToldOnceAndTheOlderCheckpointStays) {
  if (!fault::kCompiledIn) GTEST_SKIP() << "built with LONGHAUL_FAULTS=OFF";
  const TempFolder folder;
  dtensor::World world = dtensor::World::single();
  Saver saver(options(folder, AsyncMode::kCopy), alone(world));
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
  Saver saver(options(folder, AsyncMode::kCopy), alone(world));
  const fault::Armed armed("checkpoint.shard:1:throw");
  saver.save(make_snapshot(1));
  EXPECT_THAT(error_of<UserError>([&] { saver.finish(); }), HasSubstr("checkpoint.shard"));
}

TEST(Saver, CopiesAreMadeIntoTheSameMemory) {
  const Snapshot snapshot = make_snapshot(1);
  StagedSnapshot staged = stage(snapshot);
  std::map<std::string, const void*> places;
  for (const auto& [name, tensor] : staged.contents) places[name] = tensor.const_data_ptr();
  for (int step = 2; step < 52; ++step) {
    const Snapshot next = make_snapshot(step);
    staged = stage(next, {}, std::move(staged.contents));
    for (const auto& [name, tensor] : staged.contents) {
      ASSERT_EQ(tensor.const_data_ptr(), places.at(name)) << name;
      ASSERT_TRUE(at::equal(tensor, next.tensors.at(name))) << name;
    }
  }
}

// --- damage on the way to the disk ---------------------------------------------------------------

TEST(Writing, AShortWriteIsGoneOnWith) {
  if (!fault::kCompiledIn) GTEST_SKIP() << "built with LONGHAUL_FAULTS=OFF";
  const TempFolder folder;
  const fault::Armed armed("file.write:4:short");
  save(folder.path(), make_snapshot(1));
  expect_same(load(folder / "step-1"), make_snapshot(1));
}

TEST(Writing, AFlippedBitIsFoundAndTheOlderCheckpointIsTaken) {
  if (!fault::kCompiledIn) GTEST_SKIP() << "built with LONGHAUL_FAULTS=OFF";
  int writes = 0;
  {
    const TempFolder folder;
    const fault::Trace trace;
    save(folder.path(), make_snapshot(2));
    for (const auto& visit : trace.visits()) writes += visit.starts_with("file.write:");
  }
  ASSERT_GT(writes, 10);
  for (int nth = 1; nth <= writes; ++nth) {
    SCOPED_TRACE(nth);
    const TempFolder folder;
    save(folder.path(), make_snapshot(1));
    {
      const fault::Armed armed(fmt::format("file.write:{}:flip", nth));
      save(folder.path(), make_snapshot(2));
    }
    const bool damaged = !find_damage(folder / "step-2").empty();
    EXPECT_EQ(find_resumable(folder.path()), step_path(folder.path(), damaged ? 1 : 2));
    // Nothing was written where a tensor is empty.
    if (!damaged) expect_same(load(folder / "step-2"), make_snapshot(2));
  }
}

}  // namespace
}  // namespace longhaul::checkpoint
