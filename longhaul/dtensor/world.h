// One rank's view of all ranks: who it is, how they are reached, and the groups that they form. A
// value that is handed down (no global): a process usually holds one, tests hold one a thread, and
// the planner any that it likes. Groups and the log live as long as it does.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "longhaul/dtensor/communicator.h"
#include "longhaul/dtensor/thread_backend.h"

namespace c10d {
class Store;
}  // namespace c10d

namespace longhaul::dtensor {

// Where the ranks of a job that are processes meet.
struct Rendezvous {
  int rank = 0, size = 1;
  std::string host;  // of rank 0, and the port that it listens on
  int port = 0;
  std::optional<int> listen_socket = {};  // of rank 0, bound to that port: it is taken over
  at::Device device = at::kCPU;           // this rank's
  std::chrono::milliseconds timeout{300'000};
  // Lines that must be the same on all ranks: what job they are to do.
  std::string job = {};
};

class World {
 public:
  // The only rank.
  static World single();
  // A rank that is a thread; `group` has one entry a rank.
  static World thread(ThreadGroup& group, int rank);
  // A rank that is a thread and talks through gloo; all have the same `store` (a c10d HashStore).
  static World gloo_threads(c10::intrusive_ptr<c10d::Store> store, int rank, int size);
  // A rank that is a process and talks through gloo, and through NCCL for tensors of a CUDA device.
  // Rank 0 listens; its World must end last.
  // Returns when all have come; throws CollectiveError after the timeout, naming who has not, and
  // UserError if another rank has another size or job, naming the first line that differs. The
  // timeout is also the time limit of the groups until set_timeout().
  static World process(const Rendezvous& rendezvous);
  // Rank `rank` of a world whose other ranks do not exist; collectives do nothing, on any device.
  static World fake(int rank, int size);

  World(World&&) noexcept;
  World& operator=(World&&) noexcept;
  ~World();

  int rank() const;
  int size() const;
  const std::string& backend() const;  // "single", "threads", "gloo", "gloo+nccl" or "fake"
  CollectiveLog& log() const;
  // For a thread that may outlive this object and has a group: with it the group stays usable.
  std::shared_ptr<CollectiveLog> shared_log() const;
  // The same on all ranks of processes that met, and of no other job; else empty.
  const std::string& run() const;

  // Which ranks share a host, as numbers of hosts from 0: of processes by the name that each
  // machine gives itself, else one for all. set_hosts() says otherwise, the same on all ranks and
  // before there are groups: for ranks that only stand for others.
  int host_of(int rank) const;
  void set_hosts(std::vector<int> host_of_rank);

  // The time limit of each collective, in all groups there are and will be, but for those that were
  // given one of their own. Starting takes longer than training: a trainer sets a shorter one after
  // its first step.
  void set_timeout(std::chrono::milliseconds timeout);

  // The group of `global_ranks` (distinct, this one among them), in that order, along mesh axis
  // `axis`. All members must call it with the same arguments and make the groups that they share
  // in the same order; others need not. `link`: what the axis runs over, where other groups of it
  // count, too; else it follows from the hosts of these ranks. `own_timeout`: the group's time
  // limit, which set_timeout() leaves alone. Errors name rank and axis.
  Communicator make_group(const std::string& axis, const std::vector<int>& global_ranks,
                          std::optional<Link> link = std::nullopt,
                          std::optional<std::chrono::milliseconds> own_timeout = std::nullopt);

 private:
  struct State;
  explicit World(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace longhaul::dtensor
