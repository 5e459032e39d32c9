// `compare` and `report`, what a run leaves for other tools, and the terminal after a crash.
#include <poll.h>

#include <csignal>

#include "tests/cli/small_job.h"

namespace longhaul {
namespace {

using nlohmann::json;
using test::Program;
using test::slurp;
using test::Words;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

using ResultsCommand = test::SmallJob;

TEST_F(ResultsCommand, CompareTellsARunFromTheSameOneAndFromAnother) {
  expect_trained(train_only());
  expect_trained(train_only({"--job.dump_folder", "same"}));
  expect_trained(train_only({"--job.dump_folder", "other", "--optimizer.lr", "2e-3"}));
  const auto same = run({"compare", "run", "same"});
  EXPECT_EQ(same.status, 0) << same.err;
  EXPECT_THAT(same.out, AllOf(HasSubstr("lm_loss"), HasSubstr("the same, bit for bit")));
  // The first step's loss does not know its learning rate.
  const auto other = run({"compare", "run", "other"});
  test::expect_user_error(other, {"the runs differ: first in lr at step 1"}, 1);
  EXPECT_THAT(other.out, HasSubstr("grad_norm"));
  test::expect_user_error(run({"compare", "run", "same", "--steps", "7"}),
                          {"has 6 of the first 7 steps"});
  test::expect_user_error(run({"compare", "run", "corpus"}), {"holds no metrics.jsonl"});
  test::expect_user_error(run({"compare", "run", "same", "--rtol", "-1"}), {"--rtol -1"});
  test::expect_user_error(run({"compare", "run", "other", "--steps", "0"}),
                          {"--steps 0: expected 1 or more"});
}

// Scripts take 1 for runs that differ.
TEST_F(ResultsCommand, CompareThatCannotTellEndsWithTwo) {
  if (!fs::exists("/dev/full")) GTEST_SKIP() << "there is no /dev/full";
  for (const char* folder : {"one", "other"}) {
    fs::create_directory(path(folder));
    test::spill(path(folder) / "metrics.jsonl",
                json{{"step", 1}, {"loss", std::string(folder).size()}}.dump() + "\n");
  }
  auto options = here();
  options.out = "/dev/full";
  for (const char* other : {"one", "other"}) {
    test::expect_user_error(Program({"compare", "one", other}, options).wait(),
                            {"cannot write to ", "No space left on device"});
  }
}

TEST_F(ResultsCommand, ReportWritesAPage) {
  expect_trained(train_only({"--metrics.indexer_recall_freq", "2"}));
  const auto result = run({"report", "run"});
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_EQ(result.out, "run/report.html\n");
  EXPECT_THAT(slurp(path("run/report.html")),
              AllOf(StartsWith("<!doctype html>"), HasSubstr("indexer_recall"),
                    HasSubstr("expert_load"), HasSubstr("cpu_cores"), HasSubstr("dump_folder")));
  EXPECT_EQ(run({"report", "run", "run", "--output", "both.html"}).status, 0);
  EXPECT_TRUE(fs::exists(path("both.html")));
  test::expect_user_error(run({"report", "none"}), {"'none' is not a folder"});
}

TEST_F(ResultsCommand, ARunThatGoesOnLeavesOneHistory) {
  const Words wanted = {"--metrics.enable_tensorboard", "--metrics.enable_wandb",
                        "--checkpoint.last_save_model_only", "false"};
  Words first = wanted;
  first.insert(first.end(), {"--training.steps", "3"});
  expect_trained(train(first));
  expect_trained(train(wanted));
  std::ifstream history(path("run/wandb-history.jsonl"));
  int64_t steps = 0;
  for (std::string line; std::getline(history, line);) {
    EXPECT_EQ(json::parse(line)["_step"], ++steps);
  }
  EXPECT_EQ(steps, 6);
  const auto files = fs::directory_iterator(path("run/tb"));
  EXPECT_EQ(std::distance(begin(files), end(files)), 2);
}

// The shell's prompt must not stand behind half a line.
TEST_F(ResultsCommand, ASignalEndsTheOpenLine) {
  const FileDescriptor terminal(posix_openpt(O_RDWR | O_NOCTTY));
  if (!terminal.valid() || grantpt(terminal.get()) != 0 || unlockpt(terminal.get()) != 0) {
    GTEST_SKIP() << "no terminal can be opened here";
  }
  std::string rows;
  while (rows.size() < 64'000'000) {
    rows += json{{"text", test::small_text(static_cast<unsigned>(rows.size()))}}.dump() + "\n";
  }
  test::spill(path("rows.jsonl"), rows);
  const Words train = {"train",
                       "job.toml",
                       "--training.steps",
                       "100000",
                       "--metrics.log_freq",
                       "100000",
                       "--validation.no_enable",
                       "--checkpoint.no_enable"};
  struct Case {
    int signal;
    Words words;
    const char* line;  // that is open while the command goes on
  };
  const Case cases[] = {
      {SIGSEGV, train, "training: "},
      {SIGABRT, train, "training: "},
      {SIGINT,
       {"data", "prepare", "rows.jsonl", "--tokenizer", "tokenizer", "--output", "tokens"},
       "preparing: "},
      {SIGINT, {"data", "inspect", "rows.jsonl", "--tokenizer", "tokenizer"}, "reading: "},
      {SIGTERM,
       {"tokenizer", "train", "--input", "rows.jsonl", "--output", "new.json"},
       "reading: "}};
  for (const auto& [signal, words, line] : cases) {
    auto options = here({"TERM=xterm"});
    options.err = ptsname(terminal.get());
    const FileDescriptor other_end = open_file(options.err, O_RDWR | O_NOCTTY, "open");
    Program program(words, options);
    std::string shown;
    const auto read_until = [&](const std::string& what) {
      char part[4096];
      pollfd readable = {terminal.get(), POLLIN, 0};
      while (shown.find(what) == std::string::npos) {
        if (poll(&readable, 1, /*ms=*/20'000) != 1) break;
        const ssize_t size = read(terminal.get(), part, sizeof part);
        if (size <= 0) break;
        shown.append(part, static_cast<size_t>(size));
      }
    };
    read_until(line);
    shown.clear();
    program.signal(signal);
    read_until("\n");
    // The terminal makes \r\n of \n.
    EXPECT_THAT(shown, HasSubstr("\x1b[0m\r\n")) << words[0] << " " << words[1] << " " << signal;
    EXPECT_EQ(program.wait().killed_by, signal) << words[0] << " " << words[1];
  }
}

}  // namespace
}  // namespace longhaul
