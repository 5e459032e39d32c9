// What ranks that are processes leave of their collectives, and `longhaul comm show`.
#include <fstream>

#include "longhaul/base/fault.h"
#include "tests/cli/small_job.h"

namespace longhaul::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class Comm : public SmallJob {
 protected:
  ProgramResult train_on_two(const Words& more, const Words& environment = {}) const {
    Words words = {"--ranks", "2"};
    words.insert(words.end(), more.begin(), more.end());
    return train(words, environment);
  }
  // What the job says last.
  static std::string error_line(const ProgramResult& result) {
    return result.err.substr(result.err.rfind("error: "));
  }
};

TEST_F(Comm, ARankThatHangsLeavesATraceAndSoDoTheOthers) {
  if (!fault::kCompiledIn) GTEST_SKIP() << "built with LONGHAUL_FAULTS=OFF";
  const auto result = train_on_two({"--comm.train_timeout_seconds", "2"},
                                   {"LONGHAUL_FAULT=train.step:3:hang:rank-1"});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(error_line(result),
              AllOf(HasSubstr("rank 0 was in all_reduce #"), HasSubstr("on axis loss"),
                    HasSubstr("rank 1 was in none, the last was "),
                    HasSubstr("longhaul comm show run/comm_traces")));
  for (const char* name : {"run/comm_traces/rank_0.json", "run/comm_traces/rank_1.json"}) {
    EXPECT_TRUE(fs::exists(path(name))) << name;
  }
  const auto shown = run({"comm", "show", "run/comm_traces", "--last", "3"});
  EXPECT_EQ(shown.status, 0) << shown.err;
  EXPECT_THAT(shown.out,
              AllOf(HasSubstr("2 of 2 ranks"), HasSubstr("    0  failed     loss"),
                    HasSubstr("    1  after "), HasSubstr("first that not all began: all_reduce #"),
                    HasSubstr("rank 1 did not begin it"), HasSubstr("rank 1: asked by SIGUSR2")));
}

TEST_F(Comm, TheSurvivorsOfAKilledRankLeaveATrace) {
  if (!fault::kCompiledIn) GTEST_SKIP() << "built with LONGHAUL_FAULTS=OFF";
  const auto result =
      train_on_two({"--comm.train_timeout_seconds", "20", "--comm.save_traces_folder", "traces",
                    "--comm.save_traces_file_prefix", "r"},
                   {"LONGHAUL_FAULT=train.step:3:kill:rank-1"});
  EXPECT_THAT(error_line(result),
              AllOf(HasSubstr("rank 1 was killed by signal 9"), HasSubstr("rank 1 left no trace")));
  EXPECT_TRUE(fs::exists(path("run/traces/r0.json")));
  const auto shown = run({"comm", "show", "run/traces"});
  EXPECT_THAT(shown.out, AllOf(HasSubstr("1 of 2 ranks"), HasSubstr("    1  left no trace")));
}

TEST_F(Comm, NothingIsRecordedWhereItIsOff) {
  if (!fault::kCompiledIn) GTEST_SKIP() << "built with LONGHAUL_FAULTS=OFF";
  const auto result =
      train_on_two({"--comm.train_timeout_seconds", "20", "--comm.trace_buf_size", "0"},
                   {"LONGHAUL_FAULT=train.step:2:throw:rank-1"});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(error_line(result), Not(HasSubstr("comm show")));
  EXPECT_FALSE(fs::exists(path("run/comm_traces")));
  expect_user_error(run({"comm", "show", "run/comm_traces"}),
                    {"run/comm_traces", "holds no traces", "comm.save_traces_folder"});
}

// A run that is well goes on.
TEST_F(Comm, ASignalAsksForTraces) {
  Program program(train_words({"--ranks", "2", "--training.steps", "100000"}), here());
  while (program.running() && metrics().empty()) usleep(20000);
  program.signal(SIGUSR2);
  const auto traces = path("run/comm_traces");
  while (program.running() &&
         !(fs::exists(traces / "rank_0.json") && fs::exists(traces / "rank_1.json"))) {
    usleep(20000);
  }
  ASSERT_TRUE(program.running());
  program.signal(SIGINT);
  const auto result = program.wait();
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(run({"comm", "show", "run/comm_traces"}).out, HasSubstr("2 of 2 ranks"));
}

bool has_children(pid_t process) {
  std::ifstream list(fmt::format("/proc/{0}/task/{0}/children", process));
  return list.good() && list.peek() != EOF;
}

// Asked before there is anything to tell: ranks that only start are not ended by it.
TEST_F(Comm, ASignalDuringTheStartHarmsNothing) {
  Program program(train_words({"--ranks", "2", "--training.steps", "2"}), here());
  while (program.running() && !has_children(program.pid())) usleep(1000);
  while (program.running() && metrics().empty()) {
    program.signal(SIGUSR2);
    usleep(20000);
  }
  const auto result = program.wait();
  EXPECT_EQ(result.status, 0) << result.err;
}

TEST_F(Comm, MetricsSayWhatAStepCommunicated) {
  ASSERT_EQ(train_on_two({"--validation.no_enable"}).status, 0);
  const auto steps = metrics();
  ASSERT_EQ(steps.size(), 6u);
  for (const auto& step : steps) {
    const auto& comm = step.at("comm");
    ASSERT_TRUE(comm.contains("fsdp.all_gather")) << comm;
    ASSERT_TRUE(comm.contains("fsdp.reduce_scatter")) << comm;
    ASSERT_TRUE(comm.contains("loss.all_reduce")) << comm;
    // Each step moves the same.
    EXPECT_EQ(comm.at("fsdp.all_gather").at("bytes"), steps[0]["comm"]["fsdp.all_gather"]["bytes"]);
    double waited = 0;
    for (const auto& [name, of] : comm.items()) {
      EXPECT_GT(of.at("count").get<int64_t>(), 0) << name;
      EXPECT_GT(of.at("seconds").get<double>(), 0) << name;
      EXPECT_LE(of.at("waited"), of.at("seconds")) << name;
      if (!name.starts_with("checkpoint.")) waited += of.at("waited").get<double>();
    }
    const double share = step.at("comm_wait_share");
    EXPECT_GT(share, 0);
    EXPECT_LT(share, 1);
    // Of the step's time, as its tokens and their rate give it.
    const double tokens = step.at("tokens").get<double>() / step.at("step").get<double>();
    EXPECT_NEAR(share * tokens / step.at("tokens_per_second").get<double>(), waited,
                0.1 * waited + 1e-3);
  }
  ASSERT_EQ(train({"--job.dump_folder", "alone"}).status, 0);
  EXPECT_FALSE(metrics("alone").at(0).contains("comm"));
}

}  // namespace
}  // namespace longhaul::test
