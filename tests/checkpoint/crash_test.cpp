// A save that dies, or meets a full disk, at each place it can: the older checkpoint stays usable
// and the new one is complete or absent.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "longhaul/base/fault.h"
#include "longhaul/checkpoint/checkpoint.h"
#include "longhaul/checkpoint/checkpoint_reader.h"
#include "tests/checkpoint/snapshots.h"
#include "tests/support/temp_folder.h"

namespace longhaul::checkpoint {
namespace {

using test::error_of;
using test::TempFolder;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Runs the saver in a process of its own; the wait status.
int run_saver(const fs::path& folder, int step, const std::string& fault) {
  std::vector<std::string> words = {LONGHAUL_SAVER, folder.string(), std::to_string(step)};
  std::vector<char*> arguments, environment;
  for (auto& word : words) arguments.push_back(word.data());
  std::string setting = "LONGHAUL_FAULT=" + fault;
  for (char** entry = environ; *entry != nullptr; ++entry) environment.push_back(*entry);
  environment.push_back(setting.data());
  arguments.push_back(nullptr);
  environment.push_back(nullptr);
  pid_t child = 0;
  const int error =
      ::posix_spawn(&child, LONGHAUL_SAVER, nullptr, nullptr, arguments.data(), environment.data());
  EXPECT_EQ(error, 0) << std::strerror(error);
  int status = -1;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return status;
}

// Every place that a save of the test's snapshot visits, as "<place>:<nth>".
std::vector<std::string> visits_of_a_save() {
  const TempFolder folder;
  const fault::Trace trace;
  save(folder.path(), make_snapshot(2));
  return trace.visits();
}

bool is_published_at(const std::string& visit) {
  return visit.starts_with("checkpoint.renamed") || visit.starts_with("checkpoint.done");
}

class Crash : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!fault::kCompiledIn) GTEST_SKIP() << "built with LONGHAUL_FAULTS=OFF";
  }
};

TEST_F(Crash, EveryPlaceIsVisited) {
  const auto visits = visits_of_a_save();
  for (const char* place : {"begin", "tensor", "shard", "manifest", "rename", "renamed", "done"}) {
    EXPECT_THAT(visits, ::testing::Contains(fmt::format("checkpoint.{}:1", place)));
  }
}

TEST_F(Crash, KilledAtEachPlaceOfASave) {
  for (const auto& visit : visits_of_a_save()) {
    SCOPED_TRACE(visit);
    const TempFolder folder;
    save(folder.path(), make_snapshot(1));
    const int status = run_saver(folder.path(), 2, visit + ":kill");
    ASSERT_TRUE(WIFSIGNALED(status));
    ASSERT_EQ(WTERMSIG(status), SIGKILL);
    EXPECT_EQ(fs::exists(folder / "step-2"), is_published_at(visit));
    EXPECT_EQ(find_resumable(folder.path()),
              step_path(folder.path(), is_published_at(visit) ? 2 : 1));
    expect_same(load(folder / "step-1"), make_snapshot(1));
    // The next save succeeds and clears away what is left.
    save(folder.path(), make_snapshot(2));
    EXPECT_THAT(names_in(folder.path()), ElementsAre("step-1", "step-2"));
    expect_same(load(folder / "step-2"), make_snapshot(2));
  }
}

TEST_F(Crash, KilledWhileReplacingAStep) {
  for (const std::string place : {"rename", "renamed"}) {
    SCOPED_TRACE(place);
    const TempFolder folder;
    Snapshot old = make_snapshot(2);
    old.trainer["old"] = true;
    save(folder.path(), old);
    ASSERT_TRUE(WIFSIGNALED(run_saver(folder.path(), 2, "checkpoint." + place)));
    expect_same(load(folder / "step-2"), place == "rename" ? old : make_snapshot(2));
    save(folder.path(), make_snapshot(3));
    EXPECT_THAT(names_in(folder.path()), ElementsAre("step-2", "step-3"));
  }
}

// A file system that cannot exchange two folders in one move.
constexpr const char* kTwoMoves = "checkpoint.exchange:einval,";

TEST_F(Crash, AStepIsReplacedInTwoMovesToo) {
  const TempFolder folder;
  Snapshot old = make_snapshot(2);
  old.trainer["old"] = true;
  save(folder.path(), old);
  {
    const fault::Armed armed(kTwoMoves + std::string("checkpoint.aside:enospc"));
    EXPECT_THROW(save(folder.path(), make_snapshot(2)), FileError);
  }
  EXPECT_THAT(names_in(folder.path()), ElementsAre("step-2"));
  expect_same(load(folder / "step-2"), old);
  const fault::Armed armed("checkpoint.exchange:einval");
  save(folder.path(), make_snapshot(2));
  EXPECT_THAT(names_in(folder.path()), ElementsAre("step-2"));
  expect_same(load(folder / "step-2"), make_snapshot(2));
}

// Between the two moves the step has no name: the next save, or the next start of a run, gives it
// back.
TEST_F(Crash, KilledWhileReplacingAStepInTwoMoves) {
  for (const std::string place : {"aside", "replaced", "renamed"}) {
    SCOPED_TRACE(place);
    const TempFolder folder;
    Snapshot old = make_snapshot(2);
    old.trainer["old"] = true;
    save(folder.path(), old);
    const int status = run_saver(folder.path(), 2, kTwoMoves + ("checkpoint." + place));
    ASSERT_TRUE(WIFSIGNALED(status));
    EXPECT_EQ(fs::exists(folder / "step-2"), place != "aside");
    if (place == "replaced") {
      save(folder.path(), make_snapshot(3));
    } else {
      clear_stale(folder.path());
    }
    expect_same(load(folder / "step-2"), place == "aside" ? old : make_snapshot(2));
    if (place == "replaced") {
      EXPECT_THAT(names_in(folder.path()), ElementsAre("step-2", "step-3"));
    } else {
      EXPECT_THAT(names_in(folder.path()), ElementsAre("step-2"));
    }
  }
}

TEST_F(Crash, KilledWhilePurging) {
  for (const std::string place : {"purge", "purged"}) {
    const TempFolder folder;
    for (const int step : {1, 2, 3}) save(folder.path(), make_snapshot(step));
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      const fault::Armed armed("checkpoint." + place);
      purge(folder.path(), {.keep_latest_k = 1, .saved_step = 3});
      ::_exit(0);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status)) << place;
    for (const auto& step : list_steps(folder.path())) EXPECT_TRUE(find_damage(step.path).empty());
    save(folder.path(), make_snapshot(4));
    purge(folder.path(), {.keep_latest_k = 1, .saved_step = 4});
    EXPECT_THAT(names_in(folder.path()), ElementsAre("step-4")) << place;
  }
}

// Fails at each place without dying: nothing is left behind, under no name.
void expect_clean_failure(const std::string& visit, const std::string& kind) {
  SCOPED_TRACE(visit + ":" + kind);
  const TempFolder folder;
  save(folder.path(), make_snapshot(1));
  {
    const fault::Armed armed(visit + ":" + kind);
    EXPECT_THROW(save(folder.path(), make_snapshot(2)), Error);
  }
  std::vector<std::string> expected = {"step-1"};
  if (is_published_at(visit)) expected.push_back("step-2");
  EXPECT_EQ(names_in(folder.path()), expected);
  for (const auto& step : list_steps(folder.path())) EXPECT_TRUE(find_damage(step.path).empty());
}

TEST_F(Crash, FailureAtEachPlaceLeavesNothing) {
  for (const auto& visit : visits_of_a_save()) {
    expect_clean_failure(visit, "enospc");
    expect_clean_failure(visit, "throw");
  }
}

TEST_F(Crash, FullDiskSaysWhatToDo) {
  const TempFolder folder;
  const fault::Armed armed("file.write:3:enospc");
  const std::string text = error_of<FileError>([&] { save(folder.path(), make_snapshot(2)); });
  EXPECT_THAT(text, AllOf(HasSubstr("cannot save step 2 in '" + folder.path().string() + "'"),
                          HasSubstr("no space left on device"), HasSubstr("free "),
                          HasSubstr("or choose another checkpoint.folder")));
}

// A real full disk, where this may be mounted.
class SmallDisk {
 public:
  explicit SmallDisk(const fs::path& path) : path_(path) {
    fs::create_directory(path_);
    mounted_ = ::mount("none", path_.c_str(), "tmpfs", 0, "size=64k") == 0;
    if (!mounted_) reason_ = std::strerror(errno);
  }
  SmallDisk(const SmallDisk&) = delete;
  ~SmallDisk() {
    if (mounted_) ::umount2(path_.c_str(), MNT_DETACH);
  }
  bool mounted() const { return mounted_; }
  const std::string& reason() const { return reason_; }

 private:
  fs::path path_;
  bool mounted_ = false;
  std::string reason_;
};

TEST(FullDisk, TmpfsOf64KiB) {
  const TempFolder folder;
  const SmallDisk disk(folder / "disk");
  if (!disk.mounted()) GTEST_SKIP() << "a tmpfs cannot be mounted here: " << disk.reason();
  save(folder / "disk", make_snapshot(1));
  Snapshot big = make_snapshot(2);
  big.tensors["model.big"] = at::zeros({100000});
  const std::string text = error_of<FileError>([&] { save(folder / "disk", big); });
  EXPECT_THAT(text, AllOf(HasSubstr("no space left on device"), HasSubstr("free 3")));
  EXPECT_THAT(names_in(folder / "disk"), ElementsAre("step-1"));
  expect_same(load(folder / "disk/step-1"), make_snapshot(1));
  save(folder / "disk", make_snapshot(2));
  expect_same(load(folder / "disk/step-2"), make_snapshot(2));
}

// The system cuts a write short in the middle of a shard.
TEST(FullDisk, LimitOnTheSizeOfAFile) {
  const TempFolder folder;
  save(folder.path(), make_snapshot(1));
  struct rlimit before {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = ::signal(SIGXFSZ, SIG_IGN);
  struct rlimit small = before;
  small.rlim_cur = 2500;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::string text = error_of<FileError>([&] { save(folder.path(), make_snapshot(2)); });
  ::setrlimit(RLIMIT_FSIZE, &before);
  ::signal(SIGXFSZ, handler);
  EXPECT_THAT(text, AllOf(HasSubstr("model-00001.safetensors"), HasSubstr("File too large")));
  EXPECT_THAT(names_in(folder.path()), ElementsAre("step-1"));
  expect_same(load(folder / "step-1"), make_snapshot(1));
}

}  // namespace
}  // namespace longhaul::checkpoint
