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
#include <optional>
#include <thread>

#include "longhaul/base/error.h"
#include "longhaul/base/log.h"

namespace longhaul::cli {
namespace {

using Clock = std::chrono::steady_clock;

// How long ranks may take to end once they are asked to: a step to finish, a checkpoint to write.
constexpr std::chrono::seconds kGrace{20};
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
  }
  ~KeptSignals() {
    sigaction(SIGCHLD, &child_before_, nullptr);
    for (size_t i = 0; i < std::size(kSignals); ++i) sigaction(kSignals[i], &before_[i], nullptr);
  }
  KeptSignals(const KeptSignals&) = delete;

 private:
  static constexpr int kSignals[] = {SIGINT, SIGTERM, SIGUSR1};
  struct sigaction before_[std::size(kSignals)], child_before_;
};

// A port that nothing listens on now.
int free_port() {
  const int socket = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  const bool bound = socket >= 0 &&
                     bind(socket, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0 &&
                     getsockname(socket, reinterpret_cast<sockaddr*>(&address), &size) == 0;
  if (socket >= 0) close(socket);
  LONGHAUL_CHECK(bound, "no free port on 127.0.0.1: {}", std::strerror(errno));
  return ntohs(address.sin_port);
}

struct Rank {
  pid_t process = -1;
  int output = -1;           // its stderr, read end; -1: it has this process's
  std::string line;          // of its output, not ended yet
  std::string last;          // line
  std::optional<int> ended;  // wait status
};

std::vector<std::string> environment_of(int rank, int ranks, int port) {
  const int cores = std::max(1U, std::thread::hardware_concurrency());
  std::vector<std::string> settings = {fmt::format("RANK={}", rank),
                                       fmt::format("LOCAL_RANK={}", rank),
                                       fmt::format("WORLD_SIZE={}", ranks),
                                       fmt::format("LOCAL_WORLD_SIZE={}", ranks),
                                       "MASTER_ADDR=127.0.0.1",
                                       fmt::format("MASTER_PORT={}", port)};
  if (std::getenv("OMP_NUM_THREADS") == nullptr) {
    settings.push_back(fmt::format("OMP_NUM_THREADS={}", std::max(1, cores / ranks)));
  }
  return settings;
}

Rank start(int rank, int ranks, int port, const std::vector<std::string>& words) {
  Rank started;
  int ends[2] = {-1, -1};
  if (rank > 0) LONGHAUL_CHECK(pipe2(ends, O_CLOEXEC) == 0, "pipe: {}", std::strerror(errno));
  std::vector<std::string> settings = environment_of(rank, ranks, port);
  std::vector<std::string> all = {"longhaul"};
  all.insert(all.end(), words.begin(), words.end());
  std::vector<char*> arguments;
  for (auto& word : all) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  const pid_t parent = getpid();
  started.process = fork();
  LONGHAUL_CHECK(started.process >= 0, "cannot start rank {}: {}", rank, std::strerror(errno));
  if (started.process == 0) {
    prctl(PR_SET_PDEATHSIG, SIGTERM);  // also where this process is killed outright
    if (getppid() != parent) _exit(1);
    setpgid(0, 0);  // the terminal's signals come once, through this process
    for (auto& setting : settings) putenv(setting.data());
    if (rank > 0) dup2(ends[1], STDERR_FILENO);
    execv("/proc/self/exe", arguments.data());
    _exit(127);
  }
  if (rank > 0) {
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
        fmt::print(stderr, "rank {}: {}\n", number, rank.line);
        rank.last = std::exchange(rank.line, "");
      }
    }
  }
}

bool failed(int status) { return !WIFEXITED(status) || WEXITSTATUS(status) != 0; }

std::string describe(int number, const Rank& rank) {
  const int status = *rank.ended;
  if (WIFSIGNALED(status)) {
    return fmt::format("rank {} was killed by signal {} ({})", number, WTERMSIG(status),
                       strsignal(WTERMSIG(status)));
  }
  const std::string words =
      rank.last.rfind("error: ", 0) == 0 ? ": " + rank.last.substr(7) : std::string();
  return fmt::format("rank {} ended with status {}{}", number, WEXITSTATUS(status), words);
}

class Ranks {
 public:
  // Those that were started are ended even if a later one cannot be.
  Ranks(int count, const std::vector<std::string>& words) : Ranks() {
    const int port = free_port();
    for (int i = 0; i < count; ++i) ranks_.push_back(start(i, count, port, words));
  }
  ~Ranks() { end(SIGKILL); }
  Ranks(const Ranks&) = delete;

  // Until all have ended, or one has failed: its number.
  std::optional<int> wait() {
    while (!all_ended()) {
      std::this_thread::sleep_for(kPoll);
      if (const int signal = received.exchange(0)) send(signal);
      if (const auto first = collect()) return first;
    }
    return std::nullopt;
  }

  void end_others() {
    send(SIGTERM);
    const auto limit = Clock::now() + kGrace;
    while (!all_ended() && Clock::now() < limit && received.exchange(0) == 0) {
      std::this_thread::sleep_for(kPoll);
      collect();
    }
    end(SIGKILL);
  }

  const Rank& operator[](int i) const { return ranks_[static_cast<size_t>(i)]; }

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

  // Takes note of those that have ended; the first that failed.
  std::optional<int> collect() {
    std::optional<int> first;
    for (size_t i = 0; i < ranks_.size(); ++i) {
      Rank& rank = ranks_[i];
      read_output(static_cast<int>(i), rank);
      int status = 0;
      if (rank.ended || waitpid(rank.process, &status, WNOHANG) != rank.process) continue;
      read_output(static_cast<int>(i), rank);
      rank.ended = status;
      if (failed(status) && !first) first = static_cast<int>(i);
    }
    return first;
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

  std::vector<Rank> ranks_;
};

}  // namespace

void launch_ranks(int ranks, const std::vector<std::string>& words) {
  const KeptSignals signals;
  Ranks started(ranks, words);
  const auto first = started.wait();
  if (!first) return;
  const std::string what = describe(*first, started[*first]);
  started.end_others();
  const int status = *started[*first].ended;
  if (WIFEXITED(status) && WEXITSTATUS(status) == 2) fail_user("{}", what);
  throw Error(what + "; the other ranks were ended");
}

}  // namespace longhaul::cli
