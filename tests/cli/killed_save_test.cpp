// Four ranks that save together, one of which is killed at a named point of a save: the others end
// and name it, and the same command goes on bit for bit from a checkpoint that is sound.
#include <gmock/gmock.h>

#include "longhaul/base/fault.h"
#include "tests/cli/small_job.h"

namespace longhaul::test {
namespace {

using ::testing::HasSubstr;

// Where, and which of its visits is in the second of the job's saves.
struct Kill {
  const char* point;
  bool published;  // whether the save is complete there
};

constexpr Kill kKills[] = {
    {"checkpoint.begin:2:kill:rank-0", false},    {"checkpoint.shard:2:kill:rank-2", false},
    {"checkpoint.manifest:2:kill:rank-0", false}, {"checkpoint.rename:2:kill:rank-0", false},
    {"checkpoint.renamed:2:kill:rank-0", true},   {"checkpoint.done:2:kill:rank-3", true}};

class KilledSave : public SmallJob {
 protected:
  ProgramResult train_on_four(const std::string& run, const Words& environment = {}) const {
    return train(
        {"--ranks", "4", "--training.global_batch_size", "4", "--training.local_batch_size", "1",
         "--comm.train_timeout_seconds", "20", "--job.dump_folder", run, "--validation.no_enable",
         "--checkpoint.no_last_save_model_only"},
        environment);
  }

  void expect_unharmed(const Kill& kill, const std::string& name) const {
    const auto killed = train_on_four(name, {fmt::format("LONGHAUL_FAULT={}", kill.point)});
    EXPECT_EQ(killed.status, 1);
    EXPECT_THAT(killed.err, HasSubstr("was killed by signal 9"));
    const fs::path folder = path(name) / "checkpoint";
    EXPECT_EQ(fs::exists(folder / "step-4"), kill.published);
    const auto again = train_on_four(name);
    ASSERT_EQ(again.status, 0) << again.err;
    EXPECT_THAT(again.err, HasSubstr(kill.published ? "checkpoint/step-4" : "checkpoint/step-2"));
    const auto same =
        run({"checkpoint", "diff", "whole/checkpoint/step-6", (folder / "step-6").string()});
    EXPECT_EQ(same.status, 0) << same.out;
    // Nothing is left of the save that died.
    for (const auto& entry : fs::directory_iterator(folder)) {
      EXPECT_FALSE(entry.path().filename().string().starts_with(".")) << entry.path();
    }
  }
};

TEST_F(KilledSave, IsAsIfItHadNotBeen) {
  if (!fault::kCompiledIn) GTEST_SKIP() << "built with LONGHAUL_FAULTS=OFF";
  const auto whole = train_on_four("whole");
  ASSERT_EQ(whole.status, 0) << whole.err;
  for (const Kill& kill : kKills) {
    SCOPED_TRACE(kill.point);
    expect_unharmed(kill, std::string(kill.point).substr(0, std::string(kill.point).find(':')));
  }
}

}  // namespace
}  // namespace longhaul::test
