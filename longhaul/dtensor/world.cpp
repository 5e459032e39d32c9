#include "longhaul/dtensor/world.h"

#include <netdb.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <future>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "longhaul/base/rng.h"
#include "longhaul/dtensor/fake_backend.h"
#include "longhaul/dtensor/gloo_backend.h"
#include "longhaul/dtensor/nccl_backend.h"

namespace longhaul::dtensor {
namespace {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using StorePtr = c10::intrusive_ptr<c10d::Store>;
using std::chrono::milliseconds;

struct GroupRequest {
  std::string name;  // unique, the same on all members
  std::vector<int> global_ranks;
  int rank_in_group;
  milliseconds timeout;
};

struct Connection {
  BackendPtr host, device = {};
  Diagnose diagnose = {};
};

using Connect = std::function<Connection(const GroupRequest&)>;

// What f returns, or nullopt if it does not return within `limit`: the store waits for ever for an
// answer of a rank 0 that hangs, whatever its own time limit, and so does what is built on it. f
// goes on then, on a thread that nobody waits for, so it must hold what it uses.
template <typename F>
auto within(milliseconds limit, F f) -> std::optional<decltype(f())> {
  std::packaged_task<decltype(f())()> task(std::move(f));
  auto result = task.get_future();
  std::thread(std::move(task)).detach();
  if (result.wait_for(limit) != std::future_status::ready) return std::nullopt;
  return result.get();
}

constexpr const char* kLoopback = "127.0.0.1";

constexpr const char* kNoStore =
    "the ranks' store does not answer, so rank 0 of all ranks may be lost";

bool answers(const StorePtr& store) {
  try {
    store->check({"anything"});
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

// Gloo knows of the other ranks only that a connection is silent or closed. So each rank whose
// collective fails says in the store where that was, and reads where the others were: one that
// computes or is dead says nothing.
std::string ask(const StorePtr& store, const GroupRequest& request, const std::string& operation) {
  constexpr milliseconds kPatience{1000};
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  const auto key = [](int rank) { return fmt::format("failed/{}", rank); };
  std::string elsewhere;
  std::vector<int> silent;
  try {
    store->set(key(request.global_ranks[request.rank_in_group]), operation);
  } catch (const std::exception&) {
    return kNoStore;
  }
  for (const int rank : request.global_ranks) {
    if (rank == request.global_ranks[request.rank_in_group]) continue;
    const auto rest =
        std::chrono::duration_cast<milliseconds>(deadline - std::chrono::steady_clock::now());
    try {
      store->wait({key(rank)}, std::max(rest, milliseconds{1}));
      const std::string other = store->get_to_str(key(rank));
      if (other != operation) elsewhere += fmt::format("; rank {} failed in {}", rank, other);
    } catch (const std::exception&) {
      silent.push_back(rank);
    }
  }
  if (!silent.empty() && !answers(store)) return kNoStore;
  return (silent.empty()
              ? "all ranks report"
              : fmt::format("nothing was heard of {} {}, which may be lost or late",
                            silent.size() == 1 ? "rank" : "ranks", fmt::join(silent, ", "))) +
         elsewhere;
}

Diagnose ask_through(StorePtr store, const GroupRequest& request) {
  return [store = std::move(store), request](const std::string& operation) {
    constexpr milliseconds kPatience{3000};
    return within(kPatience, [=] { return ask(store, request, operation); })
        .value_or("the ranks' store does not answer, so rank 0 of all ranks may hang");
  };
}

Connect connect_by_gloo(StorePtr store, GlooDevice gloo_device, at::Device device = at::kCPU) {
  return [=](const GroupRequest& request) {
    const auto group_store = c10::make_intrusive<c10d::PrefixStore>(request.name, store);
    const int rank = request.rank_in_group, size = narrow<int>(request.global_ranks.size());
    const GlooGroup group{.store = group_store,
                          .device = gloo_device,
                          .rank = rank,
                          .size = size,
                          .timeout = request.timeout};
    Connection connection;
    connection.diagnose = ask_through(group_store, request);
    const auto fail = [&](const std::string& why) {
      throw Error(fmt::format("{}; {}", why, connection.diagnose("the group's forming")));
    };
    try {
      const auto host = within(request.timeout + milliseconds(2000),
                               [group] { return make_gloo_backend(group); });
      if (!host) fail(fmt::format("nothing was heard for {} ms", request.timeout.count()));
      connection.host = *host;
    } catch (const c10::Error& error) {
      fail(error.what_without_backtrace());
    }
    if (device.is_cuda()) {
      connection.device =
          make_nccl_backend({.store = c10::make_intrusive<c10d::PrefixStore>("nccl", group_store),
                             .rank = rank,
                             .size = size,
                             .timeout = request.timeout});
    }
    return connection;
  };
}

std::vector<std::string> split_lines(const std::string& text) {
  std::istringstream in(text);
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

// A rank's host; a time, of which the first rank's stands for the job; and a hash of what job it is
// to do, for whoever has another one to look at its lines.
struct Arrival {
  std::string host, time, job_hash;
};

std::string job_of(const Rendezvous& place) {
  return fmt::format("ranks = {}\n{}", place.size, place.job);
}

std::string own_arrival(const Rendezvous& place) {
  char host[256] = "";
  gethostname(host, sizeof host - 1);
  return fmt::format("{}\n{}\n{}", host,
                     std::chrono::system_clock::now().time_since_epoch().count(),
                     stable_hash(job_of(place)));
}

Arrival arrival_from(const std::vector<uint8_t>& bytes) {
  const auto lines = split_lines({bytes.begin(), bytes.end()});
  LONGHAUL_CHECK(lines.size() == 3, "a rank's arrival has {} lines", lines.size());
  return {lines[0], lines[1], lines[2]};
}

struct Meeting {
  StorePtr store;
  std::vector<Arrival> arrivals;
  std::vector<int> missing;  // then the others have not met
};

std::string arrival_key(int rank) { return fmt::format("arrived/{}", rank); }
std::string job_key(int rank) { return fmt::format("job/{}", rank); }

// UserError if `other` has not the same job as this rank.
void compare_jobs(c10d::Store& store, const Rendezvous& place, int other) {
  const Arrival arrival = arrival_from(store.get(arrival_key(other)));
  if (arrival.job_hash == std::to_string(stable_hash(job_of(place)))) return;
  const auto own = split_lines(job_of(place)),
             theirs = split_lines(store.get_to_str(job_key(other)));
  const auto [here, there] = std::mismatch(own.begin(), own.end(), theirs.begin(), theirs.end());
  fail_user(
      "rank {} has another job than rank {}: '{}' here, '{}' there; start all ranks with the "
      "same job file and the same options",
      place.rank, other, here == own.end() ? "" : *here, there == theirs.end() ? "" : *there);
}

// Each rank says where it is and waits for all others, for the first one first: with another number
// of ranks they would wait for different ones.
void call_the_roll(Meeting& meeting, const Rendezvous& place, milliseconds limit) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  const int rank = place.rank, size = place.size;
  std::vector<std::string> keys;
  for (int other = 0; other < size; ++other) keys.push_back(arrival_key(other));
  meeting.store->set(job_key(rank), job_of(place));
  meeting.store->set(arrival_key(rank), own_arrival(place));
  try {
    meeting.store->wait({arrival_key(0)}, limit);
    compare_jobs(*meeting.store, place, 0);
    meeting.store->wait(keys, limit);
  } catch (const UserError&) {
    throw;
  } catch (const std::exception&) {
    for (int other = 0; other < size; ++other) {
      if (!meeting.store->check({keys[static_cast<size_t>(other)]}))
        meeting.missing.push_back(other);
    }
    // The first rank has the store, from which the others are still to learn who is missing.
    if (rank == 0) std::this_thread::sleep_until(deadline + milliseconds(1000));
    if (!meeting.missing.empty()) return;
  }
  for (const auto& bytes : meeting.store->multiGet(keys)) {
    meeting.arrivals.push_back(arrival_from(bytes));
  }
  for (int other = 1; other < size && rank == 0; ++other) {
    if (meeting.arrivals[static_cast<size_t>(other)].job_hash == meeting.arrivals[0].job_hash) {
      continue;
    }
    // The others are to learn of it from the store before it goes.
    std::this_thread::sleep_for(milliseconds(1000));
    compare_jobs(*meeting.store, place, other);
  }
}

// UserError where a name cannot be looked up: the store would only say so in passing, again and
// again.
void check_name(const std::string& host) {
  addrinfo* found = nullptr;
  const int code = ::getaddrinfo(host.c_str(), nullptr, nullptr, &found);
  if (code != 0) {
    fail_user(
        "MASTER_ADDR '{}', where rank 0 listens, cannot be looked up ({}); give a name or an "
        "address that this machine knows",
        host, ::gai_strerror(code));
  }
  ::freeaddrinfo(found);
}

Meeting meet(const Rendezvous& place) {
  check_name(place.host);
  c10d::TCPStoreOptions options;
  options.port = narrow<uint16_t>(place.port);
  options.isServer = place.rank == 0;
  options.numWorkers = place.size;
  options.waitWorkers = false;  // it could not say whom it waits for
  options.timeout = place.timeout;
  options.masterListenFd = place.listen_socket;
  const auto fail = [&](const std::string& why) {
    throw CollectiveError(fmt::format(
        "rank {}: the {} ranks did not meet at {}:{} within {} ms ({}); check that all run, that "
        "rank 0 listens there and that the port is free",
        place.rank, place.size, place.host, place.port, place.timeout.count(), why));
  };
  const auto arrive = [place, options] {
    const auto start = std::chrono::steady_clock::now();
    Meeting meeting{c10::make_intrusive<c10d::TCPStore>(place.host, options), {}, {}};
    const auto rest = place.timeout - std::chrono::duration_cast<milliseconds>(
                                          std::chrono::steady_clock::now() - start);
    call_the_roll(meeting, place, std::max(rest, milliseconds(1)));
    return meeting;
  };
  try {
    // The store keeps its limit where rank 0 is absent, but not where that accepts and says
    // nothing.
    if (auto meeting = within(place.timeout + milliseconds(2000), arrive)) {
      if (meeting->missing.empty()) return *std::move(meeting);
      fail(fmt::format("{} {} did not come", meeting->missing.size() == 1 ? "rank" : "ranks",
                       fmt::join(meeting->missing, ", ")));
    }
  } catch (const c10::Error& error) {
    fail(error.what_without_backtrace());
  }
  fail("rank 0 does not answer");
  return {};
}

// The same number for the same host.
std::vector<int> numbered_hosts(const std::vector<Arrival>& arrivals) {
  std::map<std::string, int> numbers;
  std::vector<int> hosts;
  for (const auto& arrival : arrivals) {
    hosts.push_back(numbers.emplace(arrival.host, narrow<int>(numbers.size())).first->second);
  }
  return hosts;
}

}  // namespace

struct World::State {
  int rank = 0, size = 1;
  std::string backend;
  std::string run;
  std::vector<int> hosts;  // by rank; empty: one for all
  Connect connect;         // empty for a single rank
  milliseconds timeout = Communicator::kDefaultTimeout;
  std::shared_ptr<CollectiveLog> log = std::make_shared<CollectiveLog>();
  std::map<std::string, int> made;   // groups made by axis and ranks
  std::vector<Communicator> groups;  // those without a time limit of their own; they need the log
};

World::World(std::unique_ptr<State> state) : state_(std::move(state)) {
  LONGHAUL_CHECK(state_->rank >= 0 && state_->rank < state_->size,
                 "rank {} is not in a world of {}", state_->rank, state_->size);
}
World::World(World&&) noexcept = default;
World& World::operator=(World&&) noexcept = default;
World::~World() = default;

World World::single() {
  auto state = std::make_unique<State>();
  state->backend = "single";
  return World(std::move(state));
}

World World::thread(ThreadGroup& group, int rank) {
  auto state = std::make_unique<State>();
  state->rank = rank;
  state->size = group.size();
  state->backend = "threads";
  state->connect = [group](const GroupRequest& request) mutable {
    return Connection{group.join(request.name, request.global_ranks, request.rank_in_group)};
  };
  return World(std::move(state));
}

World World::gloo_threads(StorePtr store, int rank, int size) {
  auto state = std::make_unique<State>();
  state->rank = rank;
  state->size = size;
  state->backend = "gloo";
  state->connect = connect_by_gloo(std::move(store), make_gloo_device(kLoopback));
  return World(std::move(state));
}

World World::process(const Rendezvous& rendezvous) {
  auto state = std::make_unique<State>();
  state->rank = rendezvous.rank;
  state->size = rendezvous.size;
  state->backend = rendezvous.device.is_cuda() ? "gloo+nccl" : "gloo";
  state->timeout = rendezvous.timeout;
  // All on this machine: its own name may not resolve.
  const bool local = rendezvous.host == "localhost" || rendezvous.host == kLoopback;
  Meeting meeting = meet(rendezvous);
  state->run = meeting.arrivals.front().time;
  if (!local) state->hosts = numbered_hosts(meeting.arrivals);
  state->connect = connect_by_gloo(std::move(meeting.store),
                                   make_gloo_device(local ? kLoopback : ""), rendezvous.device);
  return World(std::move(state));
}

World World::fake(int rank, int size) {
  auto state = std::make_unique<State>();
  state->rank = rank;
  state->size = size;
  state->backend = "fake";
  state->connect = [](const GroupRequest& request) {
    return Connection{
        make_fake_backend(request.rank_in_group, narrow<int>(request.global_ranks.size()))};
  };
  return World(std::move(state));
}

int World::rank() const { return state_->rank; }
int World::size() const { return state_->size; }
const std::string& World::backend() const { return state_->backend; }
CollectiveLog& World::log() const { return *state_->log; }
std::shared_ptr<CollectiveLog> World::shared_log() const { return state_->log; }
const std::string& World::run() const { return state_->run; }

int World::host_of(int rank) const {
  return state_->hosts.empty() ? 0 : state_->hosts.at(static_cast<size_t>(rank));
}

void World::set_hosts(std::vector<int> host_of_rank) {
  LONGHAUL_CHECK(host_of_rank.size() == static_cast<size_t>(size()),
                 "hosts of {} ranks, there are {}", host_of_rank.size(), size());
  state_->hosts = std::move(host_of_rank);
}

void World::set_timeout(milliseconds timeout) {
  state_->timeout = timeout;
  for (Communicator& group : state_->groups) group.set_timeout(timeout);
}

Communicator World::make_group(const std::string& axis, const std::vector<int>& global_ranks,
                               std::optional<Link> link, std::optional<milliseconds> own_timeout) {
  const auto own = std::find(global_ranks.begin(), global_ranks.end(), rank());
  const std::set<int> distinct(global_ranks.begin(), global_ranks.end());
  LONGHAUL_CHECK(own != global_ranks.end() && distinct.size() == global_ranks.size() &&
                     *distinct.begin() >= 0 && *distinct.rbegin() < size(),
                 "rank {}: the group of axis {} has ranks {}; expected distinct ranks of 0 to {}, "
                 "this one among them",
                 rank(), axis, fmt::join(global_ranks, ", "), size() - 1);
  if (global_ranks.size() == 1) return Communicator::alone(axis, rank(), log());
  const std::string members = fmt::format("{}:{}", axis, fmt::join(global_ranks, ","));
  const GroupRequest request{fmt::format("{}#{}", members, state_->made[members]++), global_ranks,
                             narrow<int>(own - global_ranks.begin()), state_->timeout};
  Connection connection;
  try {
    connection = state_->connect(request);
  } catch (const std::exception& error) {
    const auto* c10_error = dynamic_cast<const c10::Error*>(&error);
    throw CollectiveError(
        fmt::format("rank {}: the group of axis {} (ranks {}) did not form: {}", rank(), axis,
                    fmt::join(global_ranks, ", "),
                    c10_error ? c10_error->what_without_backtrace() : error.what()));
  }
  Communicator group(std::move(connection.host), std::move(connection.device), axis, global_ranks,
                     log(), std::move(connection.diagnose));
  group.set_timeout(own_timeout.value_or(state_->timeout));
  group.set_name(request.name);
  const bool on_one_host = std::all_of(global_ranks.begin(), global_ranks.end(), [&](int rank) {
    return host_of(rank) == host_of(global_ranks.front());
  });
  group.set_link(link.value_or(on_one_host ? kWithinHost : kAcrossHosts));
  if (!own_timeout) state_->groups.push_back(group);
  return group;
}

}  // namespace longhaul::dtensor
