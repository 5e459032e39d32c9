// Ranks that save together, and saves in the background.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <map>
#include <numeric>

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

// Large enough for threads: a rank writes while the next tensors are put together.
TEST(Together, RanksWriteLargeTensorsWhileOthersAreFetched) {
  const TempFolder folder;
  Snapshot whole = make_snapshot(7);
  for (int i = 0; i < 9; ++i) {
    whole.tensors[fmt::format("model.large.{}", i)] = at::arange(400'000 + i, at::kFloat).add(i);
  }
  for (const bool in_background : {false, true}) {
    fs::remove_all(folder / "step-7");
    run_ranks(kRanks, [&](dtensor::World& world) {
      const auto training = world.make_group("training", {0, 1, 2, 3});
      const auto mode = in_background ? AsyncMode::kCopy : AsyncMode::kDisabled;
      Saver saver({.folder = folder.path(), .mode = mode}, all_of(world));
      saver.save(spread(whole, training));
      saver.finish();
    });
    expect_same(load(folder / "step-7"), whole);
  }
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

// All of them throw; the text of each.
std::vector<std::string> errors_of_a_save(const fs::path& folder, const Snapshot& whole) {
  std::mutex mutex;
  std::vector<std::string> errors;
  run_ranks(kRanks, [&](dtensor::World& world) {
    const auto ranks = all_of(world);
    const std::string error =
        error_of<UserError>([&] { save(folder, spread(whole, ranks), {.ranks = &ranks}); });
    const std::lock_guard lock(mutex);
    errors.push_back(error);
  });
  return errors;
}

TEST(Together, AFailureOnOneRankFailsOnAllAndLeavesNothingHalf) {
  if (!fault::kCompiledIn) GTEST_SKIP() << "built with LONGHAUL_FAULTS=OFF";
  for (const auto& [place, published] :
       std::map<std::string, bool>{{"checkpoint.begin:1", false},
                                   {"checkpoint.tensor:1", false},
                                   {"checkpoint.tensor:14", false},
                                   {"checkpoint.shard:2", false},
                                   {"checkpoint.manifest:1", false},
                                   {"file.sync:3", false},
                                   {"checkpoint.renamed:1", true},
                                   {"checkpoint.done:2", true}}) {
    SCOPED_TRACE(place);
    const TempFolder folder;
    save(folder.path(), make_snapshot(1));
    const Snapshot whole = make_snapshot(2);
    const fault::Armed armed(place + ":enospc");
    const auto errors = errors_of_a_save(folder.path(), whole);
    ASSERT_EQ(errors.size(), size_t{kRanks});
    int told = 0;
    for (const auto& error : errors) {
      EXPECT_THAT(error, HasSubstr("no space left on device"));
      told += error.starts_with("rank ");
    }
    EXPECT_EQ(told, kRanks - 1) << "all but the one that failed name it";
    std::vector<std::string> expected = {"step-1"};
    if (published) expected.push_back("step-2");
    EXPECT_EQ(names_in(folder.path()), expected);
    if (published) expect_same(load(folder / "step-2"), whole);
  }
}

// Each reads a share of the bytes; what one finds, all of them know.
TEST(Together, RanksFindWhatIsDamagedAndAgree) {
  const TempFolder folder;
  save(folder.path(), make_snapshot(1));
  save(folder.path(), make_snapshot(2));
  const Manifest manifest = read_manifest(folder / "step-2");
  for (const auto& [name, entry] : manifest.tensors) {
    if (entry.extent.begin == entry.extent.end) continue;
    SCOPED_TRACE(name);
    const fs::path file = folder / "step-2" / entry.extent.file;
    test::flip_byte(file, static_cast<size_t>(entry.extent.end - 1));
    run_ranks(3, [&](dtensor::World& world) {
      const auto ranks = all_of(world);
      EXPECT_EQ(find_resumable(folder.path(), -1, true, &ranks), folder / "step-1");
      EXPECT_THAT(error_of<UserError>([&] { verify_together(folder / "step-2", &ranks); }),
                  HasSubstr("tensor '" + name + "'"));
    });
    test::flip_byte(file, static_cast<size_t>(entry.extent.end - 1));
  }
  run_ranks(3, [&](dtensor::World& world) {
    const auto ranks = all_of(world);
    EXPECT_EQ(find_resumable(folder.path(), -1, true, &ranks), folder / "step-2");
  });
}

// The shares of any number of ranks are all of it: no byte is left to nobody.
TEST(Together, SharesCoverEveryByte) {
  const TempFolder folder;
  const fs::path step = save(folder.path(), make_snapshot(1), {.max_shard_bytes = 300});
  for (const auto& [file, entry] : read_manifest(step).files) {
    for (int64_t place = 0; place < entry.bytes; place += 97) {
      test::flip_byte(step / file, static_cast<size_t>(place));
      int found = 0;
      for (const int ranks : {1, 2, 5, 40}) {
        bool damaged = false;
        for (int rank = 0; rank < ranks && !damaged; ++rank) {
          try {
            CheckpointReader(step).verify({.rank = rank, .ranks = ranks});
          } catch (const UserError&) {
            damaged = true;
          }
        }
        found += damaged;
      }
      EXPECT_EQ(found, 4) << file << " byte " << place;
      test::flip_byte(step / file, static_cast<size_t>(place));
    }
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

TEST(Saver, AThreadThatHangsIsGivenUpWithRankSaveAndStep) {
  if (!fault::kCompiledIn) GTEST_SKIP() << "built with LONGHAUL_FAULTS=OFF";
  dtensor::World world = dtensor::World::single();
  for (const char* place : {"checkpoint.tensor:3", "file.sync:1", "checkpoint.manifest:1"}) {
    SCOPED_TRACE(place);
    const TempFolder folder;
    auto hasty = options(folder, AsyncMode::kCopy);
    hasty.timeout = std::chrono::milliseconds(100);
    Saver saver(hasty, alone(world));
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

// --- memory --------------------------------------------------------------------------------------

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
    Saver saver(options(folder, mode), alone(world));
    int64_t before = 0;
    for (snapshot.step = 1; snapshot.step <= 50; ++snapshot.step) {
      saver.save(snapshot);
      if (snapshot.step == 5) before = resident_bytes();
    }
    saver.finish();
    EXPECT_LT(resident_bytes() - before, bytes / 2) << "of " << bytes << " a save";
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
