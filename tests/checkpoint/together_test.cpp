// Ranks that save together.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <map>
#include <numeric>

#include "longhaul/base/fault.h"
#include "longhaul/checkpoint/checkpoint_reader.h"
#include "longhaul/checkpoint/saver.h"
#include "tests/checkpoint/ranks.h"
#include "tests/support/log_capture.h"
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

TEST(Together, RanksFetchWhatTheyWrite) {
  const TempFolder folder;
  const Snapshot whole = make_snapshot(7);
  run_ranks(kRanks, [&](dtensor::World& world) {
    const auto ranks = all_of(world);
    save(folder.path(), fetched(whole, ranks), {.ranks = &ranks});
  });
  expect_same(load(folder / "step-7"), whole);
}

// Each element goes to the rank that writes it, and to no other.
TEST(Together, PartsMoveOnce) {
  const TempFolder folder;
  Snapshot whole;
  whole.tensors = {{"a", at::arange(1 << 20, at::kFloat)}, {"b", at::arange(1 << 20, at::kFloat)}};
  std::atomic<int64_t> sent = 0;
  run_ranks(2, [&](dtensor::World& world) {
    const auto ranks = all_of(world);
    save(folder.path(), spread(whole, ranks), {.ranks = &ranks});
    sent += world.log().total(dtensor::CollectiveKind::kAllToAll, "checkpoint").bytes;
  });
  EXPECT_EQ(sent, 2 * (int64_t{4} << 20) / 2) << "a half of each";
}

TEST(Together, PartsThatAreNotTheWholeAreRefused) {
  const Snapshot whole = make_snapshot(7);
  const auto error_with = [&](const std::function<void(Snapshot&, int)>& change) {
    const TempFolder folder;
    std::string error;
    run_ranks(2, [&](dtensor::World& world) {
      const auto ranks = all_of(world);
      Snapshot snapshot = spread(whole, ranks);
      change(snapshot, ranks.rank());
      const std::string text =
          error_of<Error>([&] { save(folder.path(), snapshot, {.ranks = &ranks}); });
      if (ranks.rank() == 0) error = text;
    });
    EXPECT_THAT(names_in(folder.path()), ::testing::IsEmpty());
    return error;
  };
  EXPECT_THAT(error_with([](Snapshot& snapshot, int rank) {
                auto& part = snapshot.parts.at("model.bf16").tensor;
                if (rank == 1) part = part.narrow(0, 0, part.size(0) - 1);
              }),
              HasSubstr("the ranks' parts of 'model.bf16' [3, 20] have"));
  EXPECT_THAT(error_with([](Snapshot& snapshot, int rank) {
                if (rank == 1) snapshot.parts.at("model.bf16").offsets[0] += 1;
              }),
              HasSubstr("or lie outside of it"));
  EXPECT_THAT(error_with([](Snapshot& snapshot, int) { snapshot.parts.erase("model.int64"); }),
              HasSubstr("tensor 'model.int64' has no part on this rank"));
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
      Saver saver({.folder = folder.path(), .mode = mode}, all_of(world), world.shared_log());
      saver.save(spread(whole, training));
      saver.finish();
    });
    expect_same(load(folder / "step-7"), whole);
  }
}

// The training thread is held for a copy of what the rank holds: nothing moves between ranks.
TEST(Together, ACopyInTheBackgroundTakesNoOtherRanksElements) {
  const Snapshot whole = make_snapshot(7);
  run_ranks(kRanks, [&](dtensor::World& world) {
    const auto ranks = all_of(world);
    const SaveOptions options{.ranks = &ranks};
    const Snapshot snapshot = spread(whole, ranks);
    Snapshot staged = stage(snapshot, options);
    EXPECT_EQ(world.log().total(dtensor::CollectiveKind::kAllToAll).count, 0);
    const void* place = staged.parts.at("model.embed_tokens.weight").tensor.const_data_ptr();
    for (const auto& [name, part] : staged.parts) {
      const at::Tensor& tensor = part.tensor;
      EXPECT_TRUE(tensor.is_meta() || at::equal(tensor, snapshot.parts.at(name).tensor)) << name;
    }
    staged = stage(snapshot, options, std::move(staged));
    EXPECT_EQ(staged.parts.at("model.embed_tokens.weight").tensor.const_data_ptr(), place);
  });
}

// What the ranks hold is told once: by the copy, not again by the thread that writes it.
TEST(Together, ACopyIsSavedWithThePlanItWasMadeWith) {
  const TempFolder folder;
  const Snapshot whole = make_snapshot(7);
  run_ranks(kRanks, [&](dtensor::World& world) {
    const auto ranks = all_of(world);
    const SaveOptions options{.ranks = &ranks};
    const auto told = [&](const std::function<void()>& action) {
      const auto count = [&] {
        return world.log().total(dtensor::CollectiveKind::kAllGather, "checkpoint").count;
      };
      const auto before = count();
      action();
      return count() - before;
    };
    const Snapshot snapshot = spread(whole, ranks);
    Snapshot staged;
    const auto by_stage = told([&] { staged = stage(snapshot, options); });
    const auto at_once = told([&] { save(folder / "once", snapshot, options); });
    EXPECT_EQ(told([&] { save(folder / "copy", staged, options); }) + by_stage, at_once);
  });
  expect_same(load(folder / "copy/step-7"), whole);
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

// The number of ranks, of these, whose shares hold the byte: none may be left to nobody.
size_t count_finders(const fs::path& step, const std::vector<int>& numbers_of_ranks) {
  size_t found = 0;
  for (const int ranks : numbers_of_ranks) {
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
  return found;
}

void expect_found(const fs::path& step, int64_t stride, const std::vector<int>& numbers_of_ranks) {
  for (const auto& [file, entry] : read_manifest(step).files) {
    for (int64_t place = 0; place < entry.bytes; place += stride) {
      test::flip_byte(step / file, static_cast<size_t>(place));
      EXPECT_EQ(count_finders(step, numbers_of_ranks), numbers_of_ranks.size())
          << file << " byte " << place;
      test::flip_byte(step / file, static_cast<size_t>(place));
    }
  }
}

TEST(Together, SharesCoverEveryByte) {
  const TempFolder folder;
  Snapshot small;
  small.tensors = {{"a", at::arange(5, at::kFloat)},
                   {"b", at::arange(3, at::kByte)},
                   {"optimizer.a", at::arange(5, at::kFloat)}};
  expect_found(save(folder.path(), small), 1, {1, 2, 5});
  // In many files.
  expect_found(save(folder.path(), make_snapshot(1), {.max_shard_bytes = 300}), 97, {1, 2, 5, 40});
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
