// Runs that are killed at random instants of steps and saves, again and again: each goes on from
// what was saved, and in the end all is as if nobody had disturbed it. LONGHAUL_KILLS changes the
// number of kills (default 50).
#include <ATen/Parallel.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <random>
#include <regex>

#include "longhaul/checkpoint/checkpoint.h"
#include "tests/support/kills.h"
#include "tests/train/job_fixture.h"

namespace longhaul::testing {
namespace {

using Clock = std::chrono::steady_clock;

class KilledRun {
 public:
  KilledRun(const GoldenJob& job, const std::string& async_mode)
      : job_(job),
        config_(job.config({"--training.steps", "12", "--checkpoint.interval", "2",
                            "--checkpoint.keep_latest_k", "2", "--checkpoint.async_mode",
                            async_mode, "--metrics.log_freq", "1"})) {
    const auto start = Clock::now();
    EXPECT_TRUE(run_in_process(std::nullopt));
    seconds_ = std::chrono::duration<double>(Clock::now() - start).count();
    whole_ = result();
    begin_anew();
  }

  // Kills the run after that share of the time that it takes undisturbed. Checks what it leaves.
  void kill_after(double share) {
    const bool complete = run_in_process(share * seconds_);
    ++(complete ? completed_ : kills_);
    in_a_save_ += test::was_saving(checkpoints());
    const auto found = checkpoint::find_resumable(checkpoints());
    const int64_t step = found ? checkpoint::step_of(found->filename()) : 0;
    ASSERT_GE(step, std::max(step_, last_reported())) << "what was saved is lost";
    step_ = step;
    if (complete) expect_undisturbed();
  }

  void complete() {
    ASSERT_TRUE(run_in_process(std::nullopt));
    ++completed_;
    expect_undisturbed();
  }

  int kills() const { return kills_; }
  int in_a_save() const { return in_a_save_; }
  int completed() const { return completed_; }

 private:
  struct Result {
    checkpoint::Snapshot state;
    std::vector<std::pair<int64_t, double>> losses;  // by step
  };

  fs::path log() const { return job_.folder.path() / "log"; }

  // The last step that the run has reported as saved.
  int64_t last_reported() const {
    const std::regex saved(R"(saved \S+/step-(\d+) in)");
    std::ifstream in(log());
    int64_t step = 0;
    std::smatch match;
    for (std::string line; std::getline(in, line);) {
      if (std::regex_search(line, match, saved)) step = std::stoll(match[1]);
    }
    return step;
  }

  fs::path folder() const { return job_.folder.path() / "run"; }
  fs::path checkpoints() const { return folder() / "checkpoint"; }

  // In a process of its own, killed after so many seconds; whether it came to its end before.
  bool run_in_process(std::optional<double> seconds) const {
    const pid_t child = ::fork();
    EXPECT_GE(child, 0);
    if (child == 0) {
      EXPECT_NE(std::freopen(log().c_str(), "w", stderr), nullptr);
      at::set_num_threads(1);  // the threads of the process that was forked are not here
      int status = 1;
      try {
        run(config_);
        status = 0;
      } catch (const std::exception& error) {
        std::printf("%s\n", error.what());
      }
      std::fflush(stdout);
      ::_exit(status);
    }
    if (seconds) {
      ::usleep(static_cast<useconds_t>(*seconds * 1e6));
      ::kill(child, SIGKILL);
    }
    int status = 0;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) return false;
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "the run failed by itself";
    return true;
  }

  Result result() const {
    const auto found = checkpoint::find_resumable(checkpoints());
    if (!found) {
      ADD_FAILURE() << "nothing is saved";
      return {};
    }
    Result result{checkpoint::load(*found), {}};
    for (const auto& line : job_.metrics()) {
      if (line.contains("loss")) result.losses.emplace_back(line.at("step"), line.at("loss"));
    }
    return result;
  }

  void expect_undisturbed() {
    const Result now = result();
    EXPECT_EQ(now.state.step, whole_.state.step);
    EXPECT_EQ(now.state.trainer, whole_.state.trainer);
    EXPECT_EQ(now.losses, whole_.losses);
    EXPECT_EQ(now.losses.size(), 12u);
    ASSERT_EQ(now.state.tensors.size(), whole_.state.tensors.size());
    for (const auto& [name, tensor] : whole_.state.tensors) {
      EXPECT_TRUE(at::equal(now.state.tensors.at(name), tensor)) << name;
    }
    begin_anew();
  }

  void begin_anew() {
    fs::remove_all(folder());
    step_ = 0;
  }

  const GoldenJob& job_;
  const JobConfig config_;
  double seconds_ = 0;
  Result whole_;
  int64_t step_ = 0;
  int kills_ = 0, in_a_save_ = 0, completed_ = 0;
};

TEST(RandomKills, OfRunsChangeNothing) {
  const GoldenJob job("hf_base", load_golden("hf_base/train20.safetensors").at("batches"));
  std::mt19937 random(11);
  std::uniform_real_distribution<double> share(0, 0.8);
  int kills = 0, in_a_save = 0, completed = 0;
  for (const char* mode : {"disabled", "async"}) {
    KilledRun run(job, mode);
    while (run.kills() < test::wanted_kills(50) / 2) {
      ASSERT_NO_FATAL_FAILURE(run.kill_after(share(random)));
    }
    ASSERT_NO_FATAL_FAILURE(run.complete());
    kills += run.kills();
    in_a_save += run.in_a_save();
    completed += run.completed();
  }
  EXPECT_GT(in_a_save, 0) << "of " << kills << " kills none hit a save";
  std::printf("%d kills, %d of them within a save; %d runs ended as if there had been none\n",
              kills, in_a_save, completed);
}

}  // namespace
}  // namespace longhaul::testing
