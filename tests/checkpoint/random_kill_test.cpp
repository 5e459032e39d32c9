// A run that is killed at random instants, again and again: what was reported as saved is never
// lost, and what is found is complete. LONGHAUL_KILLS changes the number of kills (default 100).
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <random>

#include "longhaul/checkpoint/checkpoint.h"
#include "longhaul/checkpoint/saver.h"
#include "longhaul/dtensor/world.h"
#include "tests/checkpoint/snapshots.h"
#include "tests/support/kills.h"
#include "tests/support/temp_folder.h"

namespace longhaul::checkpoint {
namespace {

using test::TempFolder;

// Goes on from the newest checkpoint, saves each step, and writes the number of each that is
// durable to `report`. In the background every save is reported when the next one begins.
[[noreturn]] void train_for_ever(const fs::path& folder, AsyncMode mode, int report) {
  const auto found = find_resumable(folder);
  int64_t step = found ? load(*found).step : 0;
  dtensor::World world = dtensor::World::single();
  Saver saver({.folder = folder, .keep_latest_k = 2, .mode = mode},
              dtensor::Communicator::alone("checkpoint", 0, world.log()), world.shared_log());
  const auto tell = [report](int64_t durable) {
    if (::write(report, &durable, sizeof durable) != sizeof durable) ::_exit(1);
  };
  for (bool first = true;; first = false) {
    saver.save(make_snapshot(++step));
    if (mode == AsyncMode::kDisabled) {
      tell(step);
    } else if (!first) {
      tell(step - 1);
    }
  }
}

// The last step that a killed run has reported; `before` if none.
int64_t last_report(int report, int64_t before) {
  int64_t last = before;
  for (int64_t step = 0; ::read(report, &step, sizeof step) == sizeof step;) last = step;
  return last;
}

int64_t run_and_kill(const fs::path& folder, AsyncMode mode, int microseconds, int64_t before) {
  int ends[2];
  EXPECT_EQ(::pipe(ends), 0);
  const pid_t child = ::fork();
  EXPECT_GE(child, 0);
  if (child == 0) {
    try {
      train_for_ever(folder, mode, ends[1]);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
    }
    ::_exit(1);
  }
  ::close(ends[1]);
  ::usleep(static_cast<useconds_t>(microseconds));
  ::kill(child, SIGKILL);
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(status)) << "the run ended by itself";
  const int64_t last = last_report(ends[0], before);
  ::close(ends[0]);
  return last;
}

TEST(RandomKills, LoseNothing) {
  std::mt19937 random(7);
  std::uniform_int_distribution<int> microseconds(0, 120'000);
  int kills = 0, in_a_save = 0;
  for (const auto mode : {AsyncMode::kDisabled, AsyncMode::kCopy}) {
    const TempFolder folder;
    int64_t durable = 0;
    for (int i = 0; i < test::wanted_kills(100) / 2; ++i, ++kills) {
      durable = run_and_kill(folder.path(), mode, microseconds(random), durable);
      in_a_save += test::was_saving(folder.path());
      const auto found = find_resumable(folder.path());
      if (durable == 0 && !found) continue;
      ASSERT_TRUE(found) << "step " << durable << " was reported as saved";
      const Snapshot state = load(*found);
      ASSERT_GE(state.step, durable);
      expect_same(state, make_snapshot(state.step));
      durable = state.step;
    }
    EXPECT_GT(durable, 0);
  }
  EXPECT_GT(in_a_save, kills / 20) << "of " << kills << " kills too few hit a save";
  std::printf("%d kills, %d of them within a save: nothing was lost\n", kills, in_a_save);
}

}  // namespace
}  // namespace longhaul::checkpoint
