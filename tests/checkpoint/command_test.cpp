// What a user of `longhaul checkpoint` sees.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <CLI/CLI.hpp>

#include "longhaul/base/json.h"
#include "longhaul/cli/commands.h"
#include "tests/checkpoint/snapshots.h"
#include "tests/support/temp_folder.h"

namespace longhaul::cli {

namespace {

using checkpoint::make_snapshot;
using test::TempFolder;
using ::testing::AllOf;
using ::testing::HasSubstr;

struct Outcome {
  int status = 0;
  std::string output;
  std::string error;
};

// As main does it: an Error is status 1, a UserError 2.
Outcome run(std::vector<std::string> words) {
  CLI::App app;
  add_checkpoint_command(app);
  std::reverse(words.begin(), words.end());
  Outcome outcome;
  ::testing::internal::CaptureStdout();
  try {
    app.parse(words);
  } catch (const CLI::ParseError& error) {
    outcome.status = app.exit(error) == 0 ? 0 : 2;
  } catch (const UserError& error) {
    outcome = {2, "", error.what()};
  } catch (const Error& error) {
    outcome = {1, "", error.what()};
  }
  outcome.output = ::testing::internal::GetCapturedStdout();
  return outcome;
}

TEST(CheckpointCommand, Show) {
  const TempFolder folder;
  save(folder.path(), make_snapshot(12));
  const Outcome text = run({"checkpoint", "show", folder.path()});
  EXPECT_EQ(text.status, 0);
  EXPECT_THAT(text.output, AllOf(HasSubstr("step 12, full"), HasSubstr("model.embed_tokens.weight"),
                                 HasSubstr("optimizer: 2 tensors")));
  const Outcome json = run({"checkpoint", "show", folder / "step-12", "--json"});
  EXPECT_EQ(parse_json(json.output, "stdout")["tensors"].size(), 14u);
}

// A path is bytes; U+FFFD stands for those that JSON cannot hold.
TEST(CheckpointCommand, ShowsAPathThatIsNotUtf8) {
  const TempFolder folder;
  save(folder / "caf\xe9", make_snapshot(1));
  const Outcome json = run({"checkpoint", "show", folder / "caf\xe9", "--json"});
  EXPECT_EQ(json.status, 0) << json.error;
  EXPECT_EQ(parse_json(json.output, "stdout")["path"],
            (folder / "caf\xEF\xBF\xBD/step-1").string());
}

TEST(CheckpointCommand, Diff) {
  const TempFolder folder;
  save(folder / "a", make_snapshot(1));
  save(folder / "b", make_snapshot(1));
  Outcome same = run({"checkpoint", "diff", folder / "a", folder / "b"});
  EXPECT_EQ(same.status, 0) << same.error;
  EXPECT_EQ(same.output, "no differences\n");
  auto other = make_snapshot(1);
  other.tensors["model.embed_tokens.weight"] = other.tensors["model.embed_tokens.weight"] + 0.5;
  save(folder / "b", other);
  const Outcome differ = run({"checkpoint", "diff", folder / "a", folder / "b"});
  EXPECT_EQ(differ.status, 1);
  EXPECT_THAT(differ.output, HasSubstr("model.embed_tokens.weight: 60 of 60 values differ, max abs "
                                       "5.000e-01, max rel"));
  EXPECT_THAT(differ.error, HasSubstr("differ in 1 tensor"));
  EXPECT_EQ(run({"checkpoint", "diff", folder / "a", folder / "b", "--atol", "0.5"}).status, 0);
  EXPECT_EQ(run({"checkpoint", "diff", folder / "a", folder / "b", "--rtol", "-1"}).status, 2);
}

TEST(CheckpointCommand, Verify) {
  const TempFolder folder;
  save(folder.path(), make_snapshot(1));
  const Outcome good = run({"checkpoint", "verify", folder.path()});
  EXPECT_EQ(good.status, 0);
  EXPECT_THAT(good.output, HasSubstr("step-1: complete, all checksums match"));
  fs::remove(folder / "step-1/model-00001.safetensors");
  const Outcome damaged = run({"checkpoint", "verify", folder.path()});
  EXPECT_EQ(damaged.status, 1);
  EXPECT_THAT(damaged.output, HasSubstr("model-00001.safetensors' is missing"));
  EXPECT_THAT(damaged.error, HasSubstr("step-1' is damaged: 1 problem"));
}

TEST(CheckpointCommand, BadPathsAndHelp) {
  EXPECT_EQ(run({"checkpoint", "show", "no/such/place"}).status, 2);
  EXPECT_EQ(run({"checkpoint", "verify"}).status, 2);
  for (const char* command : {"show", "diff", "verify"}) {
    EXPECT_THAT(run({"checkpoint", command, "--help"}).output,
                HasSubstr(std::string("Example:\n  longhaul checkpoint ") + command));
  }
}

}  // namespace
}  // namespace longhaul::cli
