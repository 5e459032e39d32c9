#include "longhaul/dtensor/thread_backend.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "longhaul/dtensor/thread_exchange.h"

namespace longhaul::dtensor {
namespace {

using Clock = std::chrono::steady_clock;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;

// One collective of one group. Guarded by the rendezvous's mutex, except that after `ready`
// whoever draws a piece from `next_piece` reads operation and parts.
struct Exchange {
  explicit Exchange(int size) : parts(size), arrived(size, false) {}

  Operation operation;
  int first = -1;           // the rank in group that came first
  std::vector<Part> parts;  // emptied when nothing will be moved any more
  std::vector<bool> arrived;
  int num_arrived = 0;
  bool ready = false;   // all came and agree; excludes a failure other than of a piece
  std::string failure;  // empty: none
  std::atomic<int> next_piece{0};
  int pieces_done = 0;
  Clock::time_point ends_at;  // of a slow link; once ready
  std::condition_variable changed;
};

// One group.
struct Room {
  std::vector<int> ranks;                                // global
  std::map<uint64_t, std::shared_ptr<Exchange>> open;    // by sequence; until all ranks came
  Clock::time_point link_free_at = Clock::time_point{};  // of a slow link

  int size() const { return narrow<int>(ranks.size()); }
};

}  // namespace

struct ThreadRendezvous {
  int size = 1;
  SlowLink link;
  std::mutex mutex;  // guards all that follows, and what the rooms hold
  std::map<std::string, std::weak_ptr<Room>> rooms;
  std::string lost;  // why all collectives fail; empty: they don't
};

namespace {

// The mutex is held.
void fail(Exchange& exchange, std::string text) {
  exchange.failure = std::move(text);
  exchange.parts.clear();
  exchange.changed.notify_all();
}

std::string missing_ranks(const Exchange& exchange, const Room& room) {
  std::vector<int> missing;
  for (int rank = 0; rank < room.size(); ++rank) {
    if (!exchange.arrived[rank]) missing.push_back(room.ranks[rank]);
  }
  return fmt::format("{} {}", missing.size() == 1 ? "rank" : "ranks", fmt::join(missing, ", "));
}

// A collective of one rank under way.
class ThreadWork : public c10d::Work {
 public:
  ThreadWork(std::shared_ptr<ThreadRendezvous> rendezvous, std::shared_ptr<Room> room,
             std::shared_ptr<Exchange> exchange, int rank, std::chrono::milliseconds timeout)
      : rendezvous_(std::move(rendezvous)),
        room_(std::move(room)),
        exchange_(std::move(exchange)),
        rank_in_group_(rank),
        timeout_(timeout),
        deadline_(Clock::now() + timeout) {}

  // Moves what nobody else moves. Once `ready`.
  void move_pieces() {
    const int size = room_->size();
    for (int piece; (piece = exchange_->next_piece.fetch_add(1)) < size;) {
      std::string failure;
      try {
        move_piece(exchange_->operation, exchange_->parts, piece);
      } catch (const std::exception& error) {
        failure = error.what();
      }
      std::lock_guard lock(rendezvous_->mutex);
      if (!failure.empty()) exchange_->failure = failure;
      if (++exchange_->pieces_done < size) continue;
      exchange_->parts.clear();
      exchange_->changed.notify_all();
    }
  }

  // The time limit counts from the start of the collective; `timeout` is not used.
  bool wait(std::chrono::milliseconds) override {
    Exchange& exchange = *exchange_;
    std::unique_lock lock(rendezvous_->mutex);
    const auto decided = [&] { return exchange.ready || !exchange.failure.empty(); };
    if (!exchange.changed.wait_until(lock, deadline_, decided)) {
      fail(exchange, fmt::format("{} did not arrive within {} ms", missing_ranks(exchange, *room_),
                                 timeout_.count()));
    }
    if (exchange.ready) {
      lock.unlock();
      move_pieces();
      lock.lock();
      exchange.changed.wait(lock, [&] { return exchange.pieces_done == room_->size(); });
    }
    if (!exchange.failure.empty()) throw Error(exchange.failure);
    const Clock::time_point ends_at = exchange.ends_at;
    lock.unlock();
    std::this_thread::sleep_until(ends_at);
    return true;
  }

  bool isCompleted() override {
    std::lock_guard lock(rendezvous_->mutex);
    if (!exchange_->ready) return !exchange_->failure.empty();
    return exchange_->pieces_done == room_->size() && Clock::now() >= exchange_->ends_at;
  }

  // Fails the collective on all ranks unless its data moves already; wait() then returns soon.
  void abort() override {
    std::lock_guard lock(rendezvous_->mutex);
    if (exchange_->ready || !exchange_->failure.empty()) return;
    fail(*exchange_, fmt::format("rank {} gave it up because of an error of its own",
                                 room_->ranks[rank_in_group_]));
  }

 private:
  std::shared_ptr<ThreadRendezvous> rendezvous_;
  std::shared_ptr<Room> room_;
  std::shared_ptr<Exchange> exchange_;
  const int rank_in_group_;
  const std::chrono::milliseconds timeout_;
  const Clock::time_point deadline_;
};

// When the exchange ends on the group's slow link, which it occupies until then.
Clock::time_point link_end(const SlowLink& link, const Exchange& exchange, Room& room) {
  size_t bytes = 0;
  for (const Part& part : exchange.parts) {
    if (part.input.defined()) bytes = std::max({bytes, part.input.nbytes(), part.output.nbytes()});
  }
  double ms = link.latency_ms;
  if (link.bytes_per_second > 0) ms += 1e3 * static_cast<double>(bytes) / link.bytes_per_second;
  const auto duration = std::chrono::duration<double, std::milli>(ms);
  room.link_free_at = std::max(room.link_free_at, Clock::now()) +
                      std::chrono::duration_cast<Clock::duration>(duration);
  return room.link_free_at;
}

class ThreadBackend : public c10d::Backend {
 public:
  ThreadBackend(std::shared_ptr<ThreadRendezvous> rendezvous, std::shared_ptr<Room> room, int rank)
      : Backend(rank, room->size()), rendezvous_(std::move(rendezvous)), room_(std::move(room)) {}

  const std::string getBackendName() const override { return "threads"; }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override {
    return arrive({CollectiveKind::kAllGather, input.scalar_type(), input.numel()},
                  {input, output, {}, {}}, options.timeout);
  }

  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    return arrive({CollectiveKind::kReduceScatter, input.scalar_type(), input.numel(),
                   reduction_of(options.reduceOp)},
                  {input, output, {}, {}}, options.timeout);
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    const at::Tensor& tensor = only(tensors);
    return arrive({CollectiveKind::kAllReduce, tensor.scalar_type(), tensor.numel(),
                   reduction_of(options.reduceOp)},
                  {tensor, tensor, {}, {}}, options.timeout);
  }

  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_counts,
                        std::vector<int64_t>& input_counts,
                        const c10d::AllToAllOptions& options) override {
    return arrive({CollectiveKind::kAllToAll, input.scalar_type()},
                  {input, output, input_counts, output_counts}, options.timeout);
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    const at::Tensor& tensor = only(tensors);
    return arrive({.kind = CollectiveKind::kBroadcast,
                   .dtype = tensor.scalar_type(),
                   .elements = tensor.numel(),
                   .root = narrow<int>(options.rootRank)},
                  {tensor, tensor, {}, {}}, options.timeout);
  }

  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return arrive({CollectiveKind::kBarrier}, {}, options.timeout);
  }

 private:
  static const at::Tensor& only(const Tensors& tensors) {
    LONGHAUL_CHECK(tensors.size() == 1, "one tensor a collective, got {}", tensors.size());
    return tensors[0];
  }

  static Reduction reduction_of(const c10d::ReduceOp& op) {
    switch (static_cast<c10d::ReduceOp::RedOpType>(op)) {
      case c10d::ReduceOp::SUM:
        return Reduction::kSum;
      case c10d::ReduceOp::AVG:
        return Reduction::kAvg;
      case c10d::ReduceOp::MAX:
        return Reduction::kMax;
      case c10d::ReduceOp::MIN:
        return Reduction::kMin;
      default:
        LONGHAUL_CHECK(false, "ranks as threads reduce by sum, avg, max and min only");
    }
  }

  // Brings this rank's part to its next collective; the last rank moves the data.
  WorkPtr arrive(const Operation& operation, Part part, std::chrono::milliseconds timeout) {
    LONGHAUL_CHECK(!part.input.defined() || (part.input.is_cpu() && part.output.is_cpu()),
                   "ranks as threads exchange CPU tensors, got {}", part.input.device().str());
    if (timeout == c10d::kUnsetTimeout) timeout = Communicator::kDefaultTimeout;
    std::unique_lock lock(rendezvous_->mutex);
    const uint64_t sequence = next_sequence_++;
    std::shared_ptr<Exchange>& slot = room_->open[sequence];
    if (!slot) slot = std::make_shared<Exchange>(size_);
    const std::shared_ptr<Exchange> exchange = slot;
    exchange->arrived[rank_] = true;
    if (++exchange->num_arrived == size_) room_->open.erase(sequence);
    if (exchange->failure.empty()) add(*exchange, operation, std::move(part));
    const bool last = exchange->ready;
    lock.unlock();
    auto work = c10::make_intrusive<ThreadWork>(rendezvous_, room_, exchange, rank_, timeout);
    if (last) work->move_pieces();
    return work;
  }

  // The mutex is held.
  void add(Exchange& exchange, const Operation& operation, Part part) {
    if (!rendezvous_->lost.empty()) return fail(exchange, rendezvous_->lost);
    if (exchange.first < 0) {
      exchange.first = rank_;
      exchange.operation = operation;
    }
    if (operation != exchange.operation) {
      return fail(exchange, fmt::format("the ranks differ: rank {} called {}, rank {} called {}",
                                        room_->ranks[exchange.first], describe(exchange.operation),
                                        room_->ranks[rank_], describe(operation)));
    }
    exchange.parts[rank_] = std::move(part);
    if (exchange.num_arrived < size_) return;
    if (std::string text = find_count_mismatch(exchange.parts, room_->ranks); !text.empty()) {
      return fail(exchange, std::move(text));
    }
    exchange.ready = true;
    exchange.ends_at = link_end(rendezvous_->link, exchange, *room_);
    exchange.changed.notify_all();
  }

  std::shared_ptr<ThreadRendezvous> rendezvous_;
  std::shared_ptr<Room> room_;
  uint64_t next_sequence_ = 0;
};

}  // namespace

ThreadGroup::ThreadGroup(int size, SlowLink link) : state_(std::make_shared<ThreadRendezvous>()) {
  LONGHAUL_CHECK(size > 0, "a group of {} rank threads; it takes at least one", size);
  state_->size = size;
  state_->link = link;
}

int ThreadGroup::size() const { return state_->size; }

void ThreadGroup::abort(int rank, const std::string& message) {
  std::lock_guard lock(state_->mutex);
  if (!state_->lost.empty()) return;
  state_->lost = fmt::format("rank {} failed: {}", rank, message);
  for (const auto& [name, weak] : state_->rooms) {
    const auto room = weak.lock();
    if (!room) continue;
    for (const auto& [sequence, exchange] : room->open) {
      if (exchange->failure.empty()) fail(*exchange, state_->lost);
    }
  }
}

c10::intrusive_ptr<c10d::Backend> ThreadGroup::join(const std::string& name,
                                                    const std::vector<int>& global_ranks,
                                                    int rank_in_group) {
  std::shared_ptr<Room> room;
  {
    std::lock_guard lock(state_->mutex);
    std::weak_ptr<Room>& slot = state_->rooms[name];
    room = slot.lock();
    if (!room) {
      room = std::make_shared<Room>();
      room->ranks = global_ranks;
      slot = room;
    }
  }
  LONGHAUL_CHECK(room->ranks == global_ranks, "group {} is of ranks {} for one rank and {} for {}",
                 name, fmt::join(room->ranks, ", "), fmt::join(global_ranks, ", "),
                 global_ranks[rank_in_group]);
  return c10::make_intrusive<ThreadBackend>(state_, std::move(room), rank_in_group);
}

}  // namespace longhaul::dtensor
