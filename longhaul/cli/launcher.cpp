#include "longhaul/cli/launcher.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>
#include <thread>

#include "longhaul/base/clock.h"
#include "longhaul/base/error.h"
#include "longhaul/base/log.h"
#include "longhaul/base/progress.h"
#include "longhaul/cli/failure_report.h"
#include "longhaul/cli/rank_environment.h"
#include "longhaul/cli/trace_signal.h"
#include "longhaul/dtensor/trace_report.h"

namespace longhaul::cli {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

// How long ranks may take to end once they are asked to: a checkpoint to write.
constexpr std::chrono::seconds kGrace{10};
// Who waits in vain for a rank may end before that rank has; its own end is worth waiting for.
constexpr std::chrono::seconds kPatience{5};
constexpr std::chrono::milliseconds kPoll{50};

// A signal handler reaches nothing but statics.
std::atomic<int> received{0};
static_assert(std::atomic<int>::is_always_lock_free);

void receive(int signal) { received = signal; }

// While it lives, signals to this process are kept instead of ending it.
class KeptSignals {
 public:
  KeptSignals() {
    struct sigaction action {};
    action.sa_handler = receive;
    for (size_t i = 0; i < std::size(kSignals); ++i) sigaction(kSignals[i], &action, &before_[i]);
    struct sigaction normal {};
    normal.sa_handler = SIG_DFL;  // where it is ignored, nobody learns how a child has ended
    sigaction(SIGCHLD, &normal, &child_before_);
    unblock_trace_signal();
  }
  ~KeptSignals() {
    sigaction(SIGCHLD, &child_before_, nullptr);
    for (size_t i = 0; i < std::size(kSignals); ++i) sigaction(kSignals[i], &before_[i], nullptr);
  }
  KeptSignals(const KeptSignals&) = delete;

 private:
  static constexpr int kSignals[] = {SIGINT, SIGTERM, SIGUSR1, SIGUSR2};
  struct sigaction before_[std::size(kSignals)], child_before_;
};

// The socket that the ranks meet at, listening before there are any: nobody else can take its port
// before rank 0, to which it is handed, accepts on it.
class MeetingPoint {
 public:
  MeetingPoint() : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    address_.sin_family = AF_INET;
    address_.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address_;
    auto* address = reinterpret_cast<sockaddr*>(&address_);
    LONGHAUL_CHECK(socket_ >= 0 && bind(socket_, address, size) == 0 &&
                       listen(socket_, SOMAXCONN) == 0 && getsockname(socket_, address, &size) == 0,
                   "no free port on 127.0.0.1: {}", std::strerror(errno));
  }
  MeetingPoint(const MeetingPoint&) = delete;
  ~MeetingPoint() { close(socket_); }

  int socket() const { return socket_; }
  int port() const { return ntohs(address_.sin_port); }

 private:
  int socket_;
  sockaddr_in address_{};
};

// A folder that ends with this object.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = (fs::temp_directory_path() / "longhaul-XXXXXX").string();
    LONGHAUL_CHECK(mkdtemp(name.data()) != nullptr, "cannot make the folder {}: {}", name,
                   std::strerror(errno));
    path_ = name;
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  ~TemporaryFolder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

struct Rank {
  pid_t process = -1;
  int output = -1;           // its stderr, read end; -1: it has this process's
  std::string line;          // of its output, not ended yet
  std::string report;        // path of its FailureReport
  std::optional<int> ended;  // wait status
};

struct RankSettings {
  int rank, ranks;
  const MeetingPoint& place;
  std::string report;
};

std::vector<std::string> environment_of(const RankSettings& settings) {
  const int cores = std::max(1U, std::thread::hardware_concurrency());
  std::vector<std::string> variables = {fmt::format("RANK={}", settings.rank),
                                        fmt::format("LOCAL_RANK={}", settings.rank),
                                        fmt::format("WORLD_SIZE={}", settings.ranks),
                                        fmt::format("LOCAL_WORLD_SIZE={}", settings.ranks),
                                        "MASTER_ADDR=127.0.0.1",
                                        fmt::format("MASTER_PORT={}", settings.place.port()),
                                        fmt::format("{}={}", kErrorFileVariable, settings.report)};
  if (settings.rank == 0) {
    variables.push_back(fmt::format("{}={}", kListenSocketVariable, settings.place.socket()));
  }
  if (std::getenv("OMP_NUM_THREADS") == nullptr) {
    variables.push_back(fmt::format("OMP_NUM_THREADS={}", std::max(1, cores / settings.ranks)));
  }
  // c10d's warnings of a rank that is gone come with stack traces; what they mean is told by ours.
  if (std::getenv("TORCH_CPP_LOG_LEVEL") == nullptr) {
    variables.emplace_back("TORCH_CPP_LOG_LEVEL=ERROR");
  }
  return variables;
}

Rank start(const RankSettings& settings, const std::vector<std::string>& words) {
  Rank started;
  started.report = settings.report;
  const bool first = settings.rank == 0;
  int ends[2] = {-1, -1};
  if (!first) LONGHAUL_CHECK(pipe2(ends, O_CLOEXEC) == 0, "pipe: {}", std::strerror(errno));
  std::vector<std::string> variables = environment_of(settings);
  std::vector<std::string> all = {"longhaul"};
  all.insert(all.end(), words.begin(), words.end());
  std::vector<char*> arguments;
  for (auto& word : all) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  const pid_t parent = getpid();
  started.process = fork();
  LONGHAUL_CHECK(started.process >= 0, "cannot start rank {}: {}", settings.rank,
                 std::strerror(errno));
  if (started.process == 0) {
    prctl(PR_SET_PDEATHSIG, SIGTERM);  // also where this process is killed outright
    if (getppid() != parent) _exit(1);
    setpgid(0, 0);         // the terminal's signals come once, through this process
    block_trace_signal();  // until the rank can answer it
    for (auto& variable : variables) putenv(variable.data());
    if (first) fcntl(settings.place.socket(), F_SETFD, 0);
    if (!first) dup2(ends[1], STDERR_FILENO);
    execv("/proc/self/exe", arguments.data());
    _exit(127);
  }
  if (!first) {
    close(ends[1]);
    fcntl(ends[0], F_SETFL, O_NONBLOCK);
    started.output = ends[0];
  }
  return started;
}

// Shows what the rank has said since.
void read_output(int number, Rank& rank) {
  char buffer[4096];
  while (rank.output >= 0) {
    const ssize_t n = read(rank.output, buffer, sizeof buffer);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n <= 0) {
      close(rank.output);
      rank.output = -1;
      return;
    }
    for (const char c : std::string_view(buffer, static_cast<size_t>(n))) {
      if (c != '\n') {
        rank.line += c;
        continue;
      }
      if (!rank.line.empty()) {
        fmt::print(stderr, "{}rank {}: {}\n", ProgressLine::erasure(), number, rank.line);
      }
      rank.line.clear();
    }
  }
}

struct Failure {
  std::string what;
  bool users_mistake = false;
  bool of_another_rank = false;
};

// nullopt for a rank that has ended well.
std::optional<Failure> failure_of(int number, const Rank& rank) {
  const int status = *rank.ended;
  if (WIFSIGNALED(status)) {
    return Failure{fmt::format("rank {} was killed by signal {} ({})", number, WTERMSIG(status),
                               strsignal(WTERMSIG(status)))};
  }
  if (WEXITSTATUS(status) == 0) return std::nullopt;
  Failure failure{fmt::format("rank {} ended with status {}", number, WEXITSTATUS(status))};
  failure.users_mistake = WEXITSTATUS(status) == 2;
  if (const auto report = read_failure_report(rank.report)) {
    failure.what += ": " + report->message;
    failure.of_another_rank = report->of_another_rank;
  }
  return failure;
}

class Ranks {
 public:
  // Those that were started are ended even if a later one cannot be.
  Ranks(int count, const std::vector<std::string>& words) : Ranks() {
    const MeetingPoint place;
    for (int i = 0; i < count; ++i) {
      const fs::path report = reports_.path() / fmt::format("rank-{}.json", i);
      ranks_.push_back(start({i, count, place, report.string()}, words));
    }
  }
  ~Ranks() { end(SIGKILL); }
  Ranks(const Ranks&) = delete;

  // Until all have ended, or one has failed.
  void wait() {
    while (!all_ended() && failures_.empty()) poll();
  }

  // Why the job failed, of what is known a little after the first failure; nullopt if it did not.
  std::optional<Failure> first_cause() {
    if (failures_.empty()) return std::nullopt;
    const auto by_itself = [](const Failure& failure) { return !failure.of_another_rank; };
    const auto find = [&] { return std::find_if(failures_.begin(), failures_.end(), by_itself); };
    const auto limit = Clock::now() + kPatience;
    while (find() == failures_.end() && !all_ended() && Clock::now() < limit) poll();
    if (const auto found = find(); found != failures_.end()) return *found;
    Failure first = failures_.front();
    if (const auto running = still_running(); !running.empty()) {
      first.what +=
          fmt::format("; still running, so hanging or slow: rank {}", fmt::join(running, ", "));
    }
    return first;
  }

  void end_others(bool with_traces) {
    if (with_traces) send(SIGUSR2);  // those that hang write theirs, too
    send(SIGTERM);
    const auto limit = Clock::now() + kGrace;
    while (!all_ended() && Clock::now() < limit && received.exchange(0) == 0) {
      std::this_thread::sleep_for(kPoll);
      collect();
    }
    end(SIGKILL);
  }

 private:
  Ranks() = default;

  bool all_ended() const {
    return std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& r) { return !!r.ended; });
  }

  void send(int signal) {
    for (const auto& rank : ranks_) {
      if (!rank.ended) kill(rank.process, signal);
    }
  }

  std::vector<int> still_running() const {
    std::vector<int> running;
    for (size_t i = 0; i < ranks_.size(); ++i) {
      if (!ranks_[i].ended) running.push_back(static_cast<int>(i));
    }
    return running;
  }

  void poll() {
    std::this_thread::sleep_for(kPoll);
    if (const int signal = received.exchange(0)) {
      if (signal != SIGUSR2) {
        passed_on_ = signal;
        ++stops_;
      }
      send(signal);
    }
    collect();
  }

  // Takes note of those that have ended.
  void collect() {
    for (size_t i = 0; i < ranks_.size(); ++i) {
      Rank& rank = ranks_[i];
      const int number = static_cast<int>(i);
      read_output(number, rank);
      int status = 0;
      if (rank.ended || waitpid(rank.process, &status, WNOHANG) != rank.process) continue;
      read_output(number, rank);
      rank.ended = status;
      auto failure = failure_of(number, rank);
      // At the first one it had nothing to save yet; a second one does not wait for a save.
      if (failure && WIFSIGNALED(status) && WTERMSIG(status) == passed_on_) {
        failure->what = stops_ == 1
                            ? fmt::format("stopped by signal {} ({}) before the first step",
                                          passed_on_, strsignal(passed_on_))
                            : fmt::format(
                                  "stopped at once by a second signal, {} ({}): steps since "
                                  "the newest checkpoint are lost",
                                  passed_on_, strsignal(passed_on_));
      }
      if (failure) failures_.push_back(*std::move(failure));
    }
  }

  void end(int signal) {
    send(signal);
    for (size_t i = 0; i < ranks_.size(); ++i) {
      Rank& rank = ranks_[i];
      int status = 0;
      if (!rank.ended && waitpid(rank.process, &status, 0) == rank.process) rank.ended = status;
      read_output(static_cast<int>(i), rank);
    }
  }

  TemporaryFolder reports_;
  std::vector<Rank> ranks_;
  int passed_on_ = 0;              // the signal that this process was sent last
  int stops_ = 0;                  // how many there were
  std::vector<Failure> failures_;  // in the order in which they were seen
};

// In which collective each rank was, by the traces that were written since `start`.
std::string collectives_text(const fs::path& folder, double start) {
  constexpr size_t kFew = 8;  // ranks that a line has room for
  try {
    const auto traces = dtensor::read_traces(folder);
    if (traces.front().written < start) return "";
    const std::string difference = dtensor::difference_text(traces);
    return fmt::format("; {}{} (`longhaul comm show {}`)",
                       traces.size() > kFew ? "" : dtensor::positions_text(traces),
                       difference.empty() ? "" : "; not all began " + difference, folder.string());
  } catch (const std::exception&) {
    return "";  // nobody left any, or somebody is still writing
  }
}

}  // namespace

void launch_ranks(const Launch& launch) {
  const KeptSignals signals;
  const double start = seconds_since_1970();
  Ranks started(launch.ranks, launch.words);
  started.wait();
  const auto cause = started.first_cause();
  if (!cause) return;
  started.end_others(!launch.traces.empty());
  fmt::print(stderr, "{}", ProgressLine::erasure());  // a rank 0 that was killed left its line open
  if (cause->users_mistake) fail_user("{}", cause->what);
  throw Error(cause->what + collectives_text(launch.traces, start) +
              "; the other ranks were ended");
}

}  // namespace longhaul::cli
