// Two ranks that train together, of which one is killed at a random instant, again and again: the
// same command goes on each time, and in the end all is as if nobody had disturbed them.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <random>
#include <sstream>

#include "tests/cli/small_job.h"

namespace longhaul::test {
namespace {

using ::testing::HasSubstr;
using Seconds = std::chrono::duration<double>;
using Clock = std::chrono::steady_clock;

constexpr int kKills = 20;
constexpr int kSteps = 30;
const std::string kLast = "checkpoint/step-30";

class KilledRanks : public SmallJob {
 protected:
  static Words words(const std::string& run, const std::string& mode) {
    return train_words(
        {"--ranks", "2", "--job.dump_folder", run, "--training.steps", std::to_string(kSteps),
         "--validation.no_enable", "--checkpoint.async_mode", mode, "--checkpoint.keep_latest_k",
         "2", "--checkpoint.no_last_save_model_only", "--comm.train_timeout_seconds", "20"});
  }

  // The processes of the ranks, in order; none if the program ends before they are there.
  static std::vector<pid_t> ranks_of(Program& program) {
    const auto pid = std::to_string(program.pid());
    std::vector<pid_t> ranks;
    while (program.running() && ranks.size() < 2) {
      ranks.clear();
      std::istringstream list(slurp("/proc/" + pid + "/task/" + pid + "/children"));
      for (pid_t rank = 0; list >> rank;) ranks.push_back(rank);
    }
    return ranks;
  }

  // A run notes each of its starts when all is ready for the first step.
  std::string starts(const std::string& run) const { return slurp(path(run) / "environment.json"); }
  void wait_for_steps(Program& program, const std::string& run, const std::string& before) const {
    while (program.running() && starts(run) == before) usleep(1000);
  }

  // Undisturbed. How long its start and its steps take.
  void make_whole() {
    const auto start = Clock::now();
    Program program(words("whole", "disabled"), here());
    wait_for_steps(program, "whole", "");
    start_seconds_ = Seconds(Clock::now() - start).count();
    expect_trained(program.wait());
    step_seconds_ = Seconds(Clock::now() - start).count() - start_seconds_;
  }

  // Kills one of the ranks, from their very start or from their first step on.
  void kill_one(const std::string& mode, bool in_steps) {
    const std::string before = starts("run");
    Program program(words("run", mode), here());
    const auto ranks = ranks_of(program);
    if (in_steps) wait_for_steps(program, "run", before);
    const double limit = in_steps ? step_seconds_ : start_seconds_ + step_seconds_;
    usleep(static_cast<useconds_t>(std::uniform_real_distribution<>(0, limit)(random_) * 1e6));
    const size_t victim = random_() % 2;
    if (program.running() && ranks.size() == 2) ::kill(ranks[victim], SIGKILL);
    const auto result = program.wait();
    if (result.status == 0) return expect_undisturbed();
    ++kills_;
    ASSERT_EQ(result.status, 1) << result.err;
    EXPECT_THAT(result.err, HasSubstr(fmt::format("rank {} was killed by signal 9", victim)));
    const int found = newest(/*hidden=*/false);
    ASSERT_GE(found, saved_) << "what was saved is lost";
    saved_ = found;
    in_a_save_ += newest(/*hidden=*/true) > found ? 1 : 0;
  }

  // Of the steps that are saved, or of the hidden folders of such that are not.
  int newest(bool hidden) const {
    int newest = 0;
    std::error_code missing;
    for (const auto& entry : fs::directory_iterator(path("run/checkpoint"), missing)) {
      const std::string name = entry.path().filename();
      int step = 0;
      if (std::sscanf(name.c_str(), hidden ? ".step-%d" : "step-%d", &step) != 1) continue;
      if (hidden || fs::exists(entry.path() / "manifest.json")) newest = std::max(newest, step);
    }
    return newest;
  }

  Words losses(const std::string& run) const {
    Words losses;
    for (const auto& line : metrics(run)) {
      losses.push_back(line.at("step").dump() + ": " + line.at("loss").dump());
    }
    return losses;
  }

  void expect_undisturbed() {
    const auto same = run({"checkpoint", "diff", "whole/" + kLast, "run/" + kLast});
    EXPECT_EQ(same.status, 0) << same.out;
    EXPECT_EQ(losses("run"), losses("whole"));
    EXPECT_EQ(losses("run").size(), static_cast<size_t>(kSteps));
    fs::remove_all(path("run"));
    saved_ = 0;
    ++completed_;
  }

  std::mt19937 random_{17};
  double start_seconds_ = 0, step_seconds_ = 0;
  int saved_ = 0;  // the newest step
  int kills_ = 0, in_a_save_ = 0, completed_ = 0;
};

TEST_F(KilledRanks, AtRandomInstantsChangeNothing) {
  ASSERT_NO_FATAL_FAILURE(make_whole());
  for (const char* mode : {"disabled", "async"}) {
    SCOPED_TRACE(mode);
    const int wanted = kills_ + kKills / 2;
    while (kills_ < wanted) {
      ASSERT_NO_FATAL_FAILURE(kill_one(mode, /*in_steps=*/kills_ % 4 != 0));
    }
    const auto result = Program(words("run", mode), here()).wait();
    ASSERT_EQ(result.status, 0) << result.err;
    expect_undisturbed();
  }
  std::printf("%d kills of one of two ranks, %d within a save; %d runs ended as if none had been\n",
              kills_, in_a_save_, completed_);
}

}  // namespace
}  // namespace longhaul::test
