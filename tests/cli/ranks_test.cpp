// `longhaul train --ranks N`: processes that train one job together, are ended together, and say
// who failed first.
#include <sys/stat.h>

#include <chrono>
#include <sstream>

#include "longhaul/base/fault.h"
#include "longhaul/cli/rank_environment.h"
#include "tests/cli/small_job.h"

namespace longhaul::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class Ranks : public SmallJob {
 protected:
  static std::string last_line(std::string text) {
    while (!text.empty() && text.back() == '\n') text.pop_back();
    return text.substr(text.rfind('\n') + 1);
  }

  ProgramResult train_on(int ranks, const Words& more, const Words& environment = {}) const {
    Words words = {"--ranks", std::to_string(ranks)};
    words.insert(words.end(), more.begin(), more.end());
    return train(words, environment);
  }

  // Processes that work in the test's folder.
  int processes() const {
    const fs::path folder = fs::canonical(folder_.path());
    int count = 0;
    for (const auto& process : fs::directory_iterator("/proc")) {
      std::error_code not_a_process;
      count += fs::read_symlink(process.path() / "cwd", not_a_process) == folder ? 1 : 0;
    }
    return count;
  }

  // Of a job of two ranks of which one does not live to its end: it ends long before the ranks
  // would stop waiting for each other by themselves, and leaves no process behind.
  ProgramResult train_with_fault(const std::string& fault, int timeout_seconds = 120) const {
    const auto start = std::chrono::steady_clock::now();
    const auto result =
        train_on(2, {"--comm.train_timeout_seconds", std::to_string(timeout_seconds)},
                 {"LONGHAUL_FAULT=" + fault});
    // The launcher's patience with the others, and a slow machine's start.
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(60)) << result.err;
    EXPECT_EQ(processes(), 0) << result.err;
    EXPECT_EQ(result.status, 1) << result.err;
    return result;
  }

  std::vector<double> losses(const std::string& run_folder) const {
    std::vector<double> found;
    for (const auto& line : metrics(run_folder)) found.push_back(line["loss"].get<double>());
    return found;
  }
};

TEST_F(Ranks, TrainAsOneProcess) {
  const Words options = {"--training.global_batch_size", "4", "--job.dump_folder"};
  auto one = options, two = options;
  one.emplace_back("one");
  two.emplace_back("two");
  ASSERT_EQ(train_on(1, one).status, 0);
  const auto result = train_on(2, two);
  ASSERT_EQ(result.status, 0) << result.err;
  const auto expected = losses("one"), actual = losses("two");
  ASSERT_EQ(expected.size(), 6u);
  ASSERT_EQ(actual.size(), 6u);
  for (size_t i = 0; i < 6; ++i) EXPECT_NEAR(actual[i] / expected[i], 1, 1e-5) << "step " << i + 1;
  EXPECT_THAT(result.err, Not(HasSubstr("rank 1:")));
}

TEST_F(Ranks, DegreesThatDoNotFitAreOneLine) {
  const auto result = train_on(4, {"--parallelism.tensor_parallel_degree", "3"});
  EXPECT_EQ(result.status, 2);
  EXPECT_THAT(result.err, HasSubstr("4 ranks = dp_replicate 1 x dp_shard -1 x cp 1 x tp 3"));
  EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
}

TEST_F(Ranks, ARankThatIsKilledIsNamedAndTheOthersEnd) {
  if (!fault::kCompiledIn) GTEST_SKIP() << "built with LONGHAUL_FAULTS=OFF";
  // The first rank has the store that they meet at.
  for (const std::string rank : {"1", "0"}) {
    fs::remove_all(path("run"));
    const auto result = train_with_fault("train.step:3:kill:rank-" + rank);
    EXPECT_THAT(result.err, HasSubstr("error: rank " + rank + " was killed by signal 9"));
    // What was saved before is sound: the run goes on.
    const auto again = train_on(2, {});
    EXPECT_EQ(again.status, 0) << again.err;
    EXPECT_THAT(again.out + again.err, HasSubstr("resumed from"));
  }
}

TEST_F(Ranks, ARankThatFailsIsNamedWithItsWords) {
  if (!fault::kCompiledIn) GTEST_SKIP() << "built with LONGHAUL_FAULTS=OFF";
  const auto result = train_with_fault("train.step:2:throw:rank-1");
  EXPECT_THAT(last_line(result.err),
              AllOf(HasSubstr("error: rank 1 ended with status 1"), HasSubstr("train.step")));
}

// The first rank's live line is open on the terminal while others speak through the launcher.
TEST_F(Ranks, OnATerminalNoTextRunsIntoTheLiveLine) {
  if (!fault::kCompiledIn) GTEST_SKIP() << "built with LONGHAUL_FAULTS=OFF";
  const Words words =
      train_words({"--ranks", "2", "--training.steps", "100", "--validation.no_enable",
                   "--checkpoint.no_enable", "--metrics.log_freq", "1000",
                   "--comm.train_timeout_seconds", "20"});
  const std::string shown = on_a_terminal(
      words, here({"NO_COLOR=1", "TERM=xterm", "LONGHAUL_FAULT=train.step:90:throw:rank-1"}));
  if (shown.empty()) GTEST_SKIP() << "no terminal can be opened here";
  EXPECT_THAT(shown, AllOf(HasSubstr("\x1b[2Ktraining: "), HasSubstr("\x1b[2Krank 1: error: "),
                           HasSubstr("\x1b[2Kerror: rank 1 ended with status 1")));
}

TEST_F(Ranks, TheFirstRanksWordsAreShownToo) {
  if (!fault::kCompiledIn) GTEST_SKIP() << "built with LONGHAUL_FAULTS=OFF";
  const auto result = train_with_fault("train.step:2:throw:rank-0");
  EXPECT_THAT(last_line(result.err),
              AllOf(HasSubstr("error: rank 0 ended with status 1: fault injection"),
                    HasSubstr("train.step"), HasSubstr("the other ranks were ended")));
}

TEST_F(Ranks, AFaultIsAnnouncedAndAMisspeltOneIsAnError) {
  if (!fault::kCompiledIn) GTEST_SKIP() << "built with LONGHAUL_FAULTS=OFF";
  const Words one_step = {"--training.steps", "1", "--validation.no_enable",
                          "--checkpoint.no_enable"};
  EXPECT_THAT(train(one_step, {"LONGHAUL_FAULT=train.step:7:kill"}).err,
              HasSubstr("LONGHAUL_FAULT is set: this program fails at train.step:7:kill"));
  expect_user_error(train(one_step, {"LONGHAUL_FAULT=train.stop:7:kill"}),
                    {"there is no place 'train.stop', did you mean 'train.step'?"});
}

// The first step has the longer limit: a rank that comes late to it is waited for.
TEST_F(Ranks, TheFirstStepHasTheLimitOfTheStart) {
  if (!fault::kCompiledIn) GTEST_SKIP() << "built with LONGHAUL_FAULTS=OFF";
  const auto result = train_on(2,
                               {"--training.steps", "1", "--validation.no_enable",
                                "--checkpoint.no_enable", "--comm.train_timeout_seconds", "1"},
                               {"LONGHAUL_FAULT=train.step:1:delay-3000:rank-1"});
  expect_trained(result);
}

TEST_F(Ranks, ARankThatHangsIsNamedAndTheRunEnds) {
  if (!fault::kCompiledIn) GTEST_SKIP() << "built with LONGHAUL_FAULTS=OFF";
  const auto result = train_with_fault("train.step:3:hang:rank-1", /*timeout_seconds=*/2);
  EXPECT_THAT(
      last_line(result.err),
      AllOf(HasSubstr("error: rank 0 ended with status 1: rank 0: "), HasSubstr("waiting 2000ms"),
            HasSubstr("nothing was heard of rank 1"), HasSubstr("hanging or slow: rank 1")));
  const auto again = train_on(2, {});
  EXPECT_EQ(again.status, 0) << again.err;
  EXPECT_THAT(again.out + again.err, HasSubstr("resumed from"));
}

// The first rank has the store that the others ask when they wait in vain.
TEST_F(Ranks, AFrozenFirstRankIsNamedAndTheRunEnds) {
  Program program(train_words({"--ranks", "2", "--training.steps", "100000",
                               "--comm.train_timeout_seconds", "2"}),
                  here());
  while (program.running() && metrics().empty()) usleep(20000);
  const auto pid = std::to_string(program.pid());
  const std::string children = slurp("/proc/" + pid + "/task/" + pid + "/children");
  ASSERT_EQ(::kill(std::stoi(children), SIGSTOP), 0) << children;
  const auto result = program.wait();
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(last_line(result.err),
              AllOf(HasSubstr("error: rank 1 ended with status 1"), HasSubstr("may hang"),
                    HasSubstr("hanging or slow: rank 0")));
}

TEST_F(Ranks, WriteTheirOwnMetricsWhereAsked) {
  ASSERT_EQ(train_on(2, {"--metrics.save_for_all_ranks"}).status, 0);
  EXPECT_EQ(metrics("run").size(), 6u);
  const std::string other = slurp(path("run/metrics.rank-1.jsonl"));
  EXPECT_EQ(std::count(other.begin(), other.end(), '\n'), 6);
}

TEST_F(Ranks, AMistakeOfTheJobIsToldOnce) {
  for (const Words& words :
       {Words{"--parallelism.tensor_parallel_degree", "2", "--parallelism.pipeline_parallel_degree",
              "2"},
        Words{"--parallelism.context_parallel_degree", "4", "--training.seq_len", "63"}}) {
    const auto result = train_on(4, words);
    EXPECT_EQ(result.status, 2);
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
  }
  expect_user_error(train_on(0, {}), {"--ranks 0", "1 to 1024"});
}

// Each rank would find these out alike.
TEST_F(Ranks, AMistakeOfTheMachineIsToldOnce) {
  const auto large = train_on(2, {"--model.flavor", "671B"});
  expect_user_error(large, {"model.flavor", "on each of 2 ranks", "this machine has"});
  EXPECT_EQ(std::count(large.err.begin(), large.err.end(), '\n'), 1) << large.err;

  Program first(train_words({"--training.steps", "100000"}), here());
  while (first.running() && metrics().empty()) usleep(20000);
  const auto busy = train_on(2, {});
  expect_user_error(busy, {"job.dump_folder", "another run is writing to 'run'"});
  EXPECT_EQ(std::count(busy.err.begin(), busy.err.end(), '\n'), 1) << busy.err;
  first.signal(SIGINT);
  EXPECT_EQ(first.wait().status, 0);
}

// A pipe can be read once: the ranks get what was in it.
TEST_F(Ranks, ReadAJobFromAPipe) {
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  for (const bool sound : {true, false}) {
    Program program({"train", "pipe", "--ranks", "2", "--job.dump_folder", "piped"}, here());
    spill(path("pipe"), sound ? kSmallJob : std::string(kSmallJob) + "[training2]\n");
    const auto result = program.wait();
    if (sound) {
      EXPECT_EQ(result.status, 0) << result.err;
      EXPECT_EQ(metrics("piped").size(), 6u);
    } else {
      expect_user_error(result, {"pipe:", "training2"});
    }
  }
}

TEST_F(Ranks, ASocketThatDoesNotListenIsNamed) {
  for (const char* socket : {"nonsense", "1", "999"}) {
    const auto result =
        train({}, {"RANK=0", "WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1", "MASTER_PORT=29511",
                   std::string("LONGHAUL_LISTEN_SOCKET=") + socket});
    expect_user_error(result, {"LONGHAUL_LISTEN_SOCKET", std::string("'") + socket + "'", "unset"});
  }
}

// It is stopped as soon as it is there, so it has met nobody.
TEST_F(Ranks, ARankThatIsFrozenBeforeTheyMeetIsNamed) {
  Program program(train_words({"--ranks", "2", "--comm.init_timeout_seconds", "3"}), here());
  const auto pid = std::to_string(program.pid());
  std::vector<int> children;
  while (program.running() && children.size() < 2) {
    children.clear();
    std::istringstream list(slurp("/proc/" + pid + "/task/" + pid + "/children"));
    for (int child; list >> child;) children.push_back(child);
  }
  ASSERT_EQ(children.size(), 2u);
  ASSERT_EQ(::kill(children[1], SIGSTOP), 0);
  const auto start = std::chrono::steady_clock::now();
  const auto result = program.wait();
  // Three seconds, one for the others to hear it, and the launcher's patience with the frozen one.
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(40));
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(last_line(result.err),
              AllOf(HasSubstr("error: rank 0 ended with status 1"), HasSubstr("did not meet"),
                    HasSubstr("within 3000 ms (rank 1 did not come)"),
                    HasSubstr("hanging or slow: rank 1")));
}

TEST_F(Ranks, ReportTheirFailureWhereTorchrunReadsIt) {
  const auto result =
      train({"--training.steps", "x"}, {"TORCHELASTIC_ERROR_FILE=" + path("error.json").string()});
  EXPECT_EQ(result.status, 2);
  const auto report = nlohmann::json::parse(slurp(path("error.json")));
  EXPECT_THAT(report["message"].get<std::string>(), HasSubstr("training.steps"));
  EXPECT_GT(report["timestamp"].get<int64_t>(), 1'700'000'000);
}

TEST_F(Ranks, AnInterruptSavesAndEndsAll) {
  Program program(train_words({"--ranks", "2", "--training.steps", "100000"}), here());
  while (program.running() && metrics().empty()) usleep(20000);
  EXPECT_EQ(processes(), 3) << "the launcher and its ranks";
  program.signal(SIGINT);
  const auto result = program.wait();
  EXPECT_EQ(processes(), 0);
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_FALSE(fs::is_empty(path("run/checkpoint")));
}

// --- what launchers say -------------------------------------------------------------------------

cli::Variables variables(std::map<std::string, std::string> set) {
  return [set = std::move(set)](const std::string& name) -> std::optional<std::string> {
    const auto found = set.find(name);
    return found == set.end() ? std::nullopt : std::optional(found->second);
  };
}

std::string text_of(const std::map<std::string, std::string>& set) {
  try {
    const auto found = cli::rank_environment(variables(set));
    if (!found) return "alone";
    const std::string local =
        found->local_rank == 0 ? "" : fmt::format(" ({} here)", found->local_rank);
    return fmt::format("{}{} of {} at {}:{}", found->rank, local, found->size, found->host,
                       found->port);
  } catch (const UserError& error) {
    return error.what();
  }
}

TEST(RankEnvironment, IsWhatTheLauncherSays) {
  EXPECT_EQ(text_of({}), "alone");
  EXPECT_EQ(text_of({{"RANK", "0"}, {"WORLD_SIZE", "1"}}), "alone");
  EXPECT_EQ(
      text_of(
          {{"RANK", "3"}, {"WORLD_SIZE", "8"}, {"MASTER_ADDR", "host"}, {"MASTER_PORT", "1234"}}),
      "3 of 8 at host:1234");
  EXPECT_EQ(text_of({{"SLURM_PROCID", "5"},
                     {"SLURM_STEP_NUM_TASKS", "16"},
                     {"SLURM_LOCALID", "1"},
                     {"SLURM_STEP_NODELIST", "node[07-08,11]"},
                     {"SLURM_JOB_ID", "40012"}}),
            "5 (1 here) of 16 at node07:20012");
  EXPECT_EQ(text_of({{"SLURM_PROCID", "0"},
                     {"SLURM_STEP_NUM_TASKS", "2"},
                     {"SLURM_STEP_NODELIST", "left,right"},
                     {"MASTER_PORT", "77"}}),
            "0 of 2 at left:77");
  // A batch script of SLURM's is no step; torchrun in one has the last word.
  EXPECT_EQ(text_of({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}}), "alone");
  EXPECT_EQ(text_of({{"RANK", "0"},
                     {"WORLD_SIZE", "1"},
                     {"SLURM_PROCID", "0"},
                     {"SLURM_STEP_NUM_TASKS", "4"}}),
            "alone");
  EXPECT_EQ(text_of({{"OMPI_COMM_WORLD_RANK", "1"},
                     {"OMPI_COMM_WORLD_SIZE", "2"},
                     {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}}),
            "1 of 2 at 127.0.0.1:29500");
}

TEST(RankEnvironment, MistakesAreNamed) {
  EXPECT_THAT(text_of({{"RANK", "x"}, {"WORLD_SIZE", "2"}}), HasSubstr("RANK is 'x'"));
  EXPECT_THAT(text_of({{"RANK", "2"}, {"WORLD_SIZE", "2"}}),
              AllOf(HasSubstr("RANK is 2"), HasSubstr("WORLD_SIZE says that there are 2")));
  EXPECT_THAT(text_of({{"RANK", "1"}, {"WORLD_SIZE", "2"}}), HasSubstr("set MASTER_ADDR"));
  EXPECT_THAT(text_of({{"RANK", "1"}}), HasSubstr("WORLD_SIZE is not set"));
  EXPECT_THAT(text_of({{"RANK", "5"}, {"WORLD_SIZE", "1"}}), HasSubstr("RANK is 5"));
  EXPECT_THAT(
      text_of(
          {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "host"}, {"MASTER_PORT", "99999"}}),
      HasSubstr("MASTER_PORT is 99999"));
}

}  // namespace
}  // namespace longhaul::test
