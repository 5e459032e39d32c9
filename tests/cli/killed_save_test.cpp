// Four ranks that save together, one of which is killed at a named point of a save: the job ends
// and names it, and the same command goes on bit for bit from a checkpoint that is sound.
#include <gmock/gmock.h>

#include <algorithm>

#include "longhaul/base/fault.h"
#include "tests/cli/small_job.h"

namespace longhaul::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Where, of the visits that a run makes which goes on from step 2 and saves step 4.
struct Kill {
  const char* point;
  bool published;  // whether the save is complete there
  // Whether step 4 is there already, incomplete.
  bool replaces() const { return std::string_view(point).starts_with("checkpoint.exchange"); }
};

constexpr Kill kKills[] = {
    {"checkpoint.begin:1:kill:rank-0", false},
    {"checkpoint.tensor:5:kill:rank-1", false},
    {"file.write:3:kill:rank-3", false},
    {"file.sync:1:kill:rank-2", false},
    {"checkpoint.shard:1:kill:rank-2", false},
    {"checkpoint.manifest:1:kill:rank-0", false},
    {"checkpoint.rename:1:kill:rank-0", false},
    {"checkpoint.renamed:1:kill:rank-0", true},
    {"checkpoint.done:1:kill:rank-3", true},
    {"checkpoint.purge:1:kill:rank-0", true},
    {"checkpoint.purged:1:kill:rank-0", true},
    {"checkpoint.exchange:1:kill:rank-0", false},
    {"checkpoint.exchange:1:einval:rank-0,checkpoint.aside:1:kill:rank-0", false},
    {"checkpoint.exchange:1:einval:rank-0,checkpoint.replaced:1:kill:rank-0", true}};
constexpr Kill kFewKills[] = {{"checkpoint.tensor:5:kill:rank-1", false},
                              {"checkpoint.renamed:1:kill:rank-0", true}};
// While training goes on.
constexpr Kill kKillsBeside[] = {{"checkpoint.tensor:5:kill:rank-1", false},
                                 {"file.sync:1:kill:rank-2", false},
                                 {"checkpoint.renamed:1:kill:rank-0", true}};

class KilledSave : public SmallJob {
 protected:
  ProgramResult train_on_four(const std::string& run, Words more = {},
                              const Words& environment = {}) const {
    more.insert(
        more.end(),
        {"--ranks", "4", "--training.global_batch_size", "4", "--training.local_batch_size", "1",
         "--comm.train_timeout_seconds", "20", "--job.dump_folder", run, "--validation.no_enable",
         "--checkpoint.no_last_save_model_only", "--checkpoint.keep_latest_k", "1"});
    return train(more, environment);
  }

  // A run that is never disturbed, and one that stands at step 2.
  void make_runs() const {
    const auto whole = train_on_four("whole");
    ASSERT_EQ(whole.status, 0) << whole.err;
    const auto begun = train_on_four("begun", {}, {"LONGHAUL_FAULT=train.step:3:kill:rank-0"});
    ASSERT_EQ(begun.status, 1) << begun.err;
    ASSERT_TRUE(fs::exists(path("begun/checkpoint/step-2/manifest.json")));
  }

  void expect_goes_on_from(int step, const std::string& name, const Words& more) const {
    const auto again = train_on_four(name, more);
    ASSERT_EQ(again.status, 0) << again.err;
    EXPECT_THAT(again.err,
                HasSubstr(fmt::format("resumed from {}/checkpoint/step-{}", name, step)));
    const fs::path folder = path(name) / "checkpoint";
    const auto same =
        run({"checkpoint", "diff", "whole/checkpoint/step-6", (folder / "step-6").string()});
    EXPECT_EQ(same.status, 0) << same.out;
    // Nothing is left of the save that died, nor of a checkpoint that was being deleted.
    for (const auto& entry : fs::directory_iterator(folder)) {
      EXPECT_EQ(entry.path().filename(), "step-6");
    }
  }

  void expect_unharmed(const Kill& kill, const Words& more = {}) const {
    SCOPED_TRACE(kill.point);
    fs::remove_all(path("run"));
    fs::copy(path("begun"), path("run"), fs::copy_options::recursive);
    if (kill.replaces()) fs::create_directory(path("run/checkpoint/step-4"));
    const auto killed = train_on_four("run", more, {fmt::format("LONGHAUL_FAULT={}", kill.point)});
    EXPECT_EQ(killed.status, 1);
    EXPECT_THAT(killed.err, HasSubstr("was killed by signal 9"));
    EXPECT_EQ(fs::exists(path("run/checkpoint/step-4/manifest.json")), kill.published);
    expect_goes_on_from(kill.published ? 4 : 2, "run", more);
  }
};

TEST_F(KilledSave, IsAsIfItHadNotBeen) {
  if (!fault::kCompiledIn) GTEST_SKIP() << "built with LONGHAUL_FAULTS=OFF";
  make_runs();
  for (const Kill& kill : kFewKills) expect_unharmed(kill);
}

TEST_F(KilledSave, KnowsEachPoint) {
  for (const std::string_view place : fault::kPlaces) {
    if (!place.starts_with("checkpoint.")) continue;
    const auto here = [place = std::string(place) + ":"](const Kill& kill) {
      return std::string_view(kill.point).find(place) != std::string_view::npos;
    };
    EXPECT_TRUE(std::any_of(std::begin(kKills), std::end(kKills), here)) << place;
  }
}

// A minute for each few points: the slow part of this suite.
TEST_F(KilledSave, AtEachPointIsAsIfItHadNotBeen) {
  if (!fault::kCompiledIn) GTEST_SKIP() << "built with LONGHAUL_FAULTS=OFF";
  make_runs();
  for (const Kill& kill : kKills) expect_unharmed(kill);
  for (const Kill& kill : kKillsBeside) expect_unharmed(kill, {"--checkpoint.async_mode", "async"});
}

// The ranks that wait for one that hangs end the run with its name, and what is saved stays.
TEST_F(KilledSave, ARankThatHangsInASaveIsNamedByTheOthers) {
  if (!fault::kCompiledIn) GTEST_SKIP() << "built with LONGHAUL_FAULTS=OFF";
  make_runs();
  for (const char* mode : {"disabled", "async"}) {
    SCOPED_TRACE(mode);
    const Words more = {"--checkpoint.async_mode", mode};
    fs::remove_all(path("run"));
    fs::copy(path("begun"), path("run"), fs::copy_options::recursive);
    Words hasty = more;
    hasty.insert(hasty.end(), {"--comm.init_timeout_seconds", "10"});
    const auto hangs =
        train_on_four("run", hasty, {"LONGHAUL_FAULT=checkpoint.shard:1:hang:rank-2"});
    EXPECT_EQ(hangs.status, 1);
    EXPECT_THAT(hangs.err, AllOf(HasSubstr("save 1 (step 4): the ranks have lost one another"),
                                 HasSubstr("nothing was heard of rank 2")));
    expect_goes_on_from(2, "run", more);
  }
}

}  // namespace
}  // namespace longhaul::test
