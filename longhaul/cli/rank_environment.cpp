#include "longhaul/cli/rank_environment.h"

#include <sys/socket.h>

#include <charconv>
#include <cstdlib>

#include "longhaul/base/error.h"

namespace longhaul::cli {
namespace {

constexpr int kDefaultPort = 29500;  // torchrun's
constexpr int kSlurmPorts = 20000;   // from there on, by the job's number

// Who sets which variables.
struct Launcher {
  const char *name, *rank, *size, *local_rank, *local_size;
};
constexpr Launcher kLaunchers[] = {
    {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
    // Of a step: a batch script has SLURM_NTASKS, too, and is alone.
    {"SLURM", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"},
    {"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE"},
    {"MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
};

int number(const std::string& name, const std::string& text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0) {
    fail_user("the environment's {} is '{}', which is no number of a rank or a port", name, text);
  }
  return value;
}

// Whoever sets it by mistake would get a program that says nothing but that a socket is bad.
int listening_socket(const std::string& text) {
  int socket = -1, listens = 0;
  socklen_t size = sizeof listens;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), socket);
  if (error != std::errc() || end != text.data() + text.size() ||
      getsockopt(socket, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) != 0 || listens == 0) {
    fail_user(
        "the environment's {} is '{}', which is no socket that listens; only `longhaul train "
        "--ranks` sets it, for rank 0: unset it",
        kListenSocketVariable, text);
  }
  return socket;
}

// The first node of "node[03-05,09],other": "node03".
std::string first_node(const std::string& list) {
  const size_t end = list.find_first_of(",[");
  if (end == std::string::npos || list[end] == ',') return list.substr(0, end);
  const size_t stop = list.find_first_of(",-]", end);
  return list.substr(0, end) + list.substr(end + 1, stop - end - 1);
}

void find_host(const Variables& variables, const Launcher& launcher, RankEnvironment& found) {
  if (const auto host = variables("MASTER_ADDR")) {
    found.host = *host;
  } else if (const auto nodes = variables("SLURM_STEP_NODELIST");
             nodes && launcher.name == std::string("SLURM")) {
    found.host = first_node(*nodes);
  } else if (variables(launcher.local_size) == std::to_string(found.size)) {
    found.host = "127.0.0.1";
  } else {
    fail_user(
        "{} started rank {} of {}, but not where rank 0 listens: set MASTER_ADDR to its host and "
        "MASTER_PORT to a free port on it",
        launcher.name, found.rank, found.size);
  }
  if (const auto port = variables("MASTER_PORT")) {
    found.port = number("MASTER_PORT", *port);
    if (found.port == 0 || found.port > 65535) {
      fail_user("the environment's MASTER_PORT is {}; expected a port, 1 to 65535", found.port);
    }
  } else if (const auto job = variables("SLURM_JOB_ID")) {
    found.port = kSlurmPorts + number("SLURM_JOB_ID", *job) % kSlurmPorts;
  } else {
    found.port = kDefaultPort;
  }
}

}  // namespace

Variables process_variables() {
  return [](const std::string& name) -> std::optional<std::string> {
    const char* value = std::getenv(name.c_str());
    return value == nullptr || *value == '\0' ? std::nullopt : std::optional<std::string>(value);
  };
}

std::optional<RankEnvironment> rank_environment(const Variables& variables) {
  for (const auto& launcher : kLaunchers) {
    const auto rank = variables(launcher.rank), size = variables(launcher.size);
    if (rank && !size && launcher.name == std::string("torchrun")) {
      fail_user("the environment's {} is {}, but {} is not set", launcher.rank, *rank,
                launcher.size);
    }
    if (!rank || !size) continue;
    RankEnvironment found{.rank = number(launcher.rank, *rank),
                          .size = number(launcher.size, *size),
                          .host = {},
                          .port = 0,
                          .listen_socket = {},
                          .origin = fmt::format("{}'s {}", launcher.name, launcher.rank)};
    if (found.rank >= found.size) {
      fail_user("the environment's {} is {}, but {} says that there are {} ranks", launcher.rank,
                found.rank, launcher.size, found.size);
    }
    if (found.size == 1) return std::nullopt;  // and it has the last word
    if (const auto local = variables(launcher.local_rank)) {
      found.local_rank = number(launcher.local_rank, *local);
    }
    find_host(variables, launcher, found);
    if (const auto socket = variables(kListenSocketVariable); socket && found.rank == 0) {
      found.listen_socket = listening_socket(*socket);
    }
    return found;
  }
  return std::nullopt;
}

}  // namespace longhaul::cli
