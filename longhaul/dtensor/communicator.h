// Collectives among the ranks of one group. Every collective of the program goes through here, so
// that one place numbers, times and logs them and says who is missing when one does not end. The
// transport is a c10d backend: gloo, ranks as threads of one process, NCCL, or a fake that moves
// nothing. Calls that differ between libtorch releases are in communicator.cpp only (and the
// functions that our own backends override, in thread_backend.cpp and fake_backend.cpp).
//
// Autograd sees nothing of a collective: no gradient flows through it, and the version counters of
// the tensors that it writes do not move, whatever the transport.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "longhaul/base/error.h"
#include "longhaul/dtensor/collective_log.h"
#include "longhaul/dtensor/link.h"

namespace c10d {
class Backend;
class Work;
}  // namespace c10d

namespace longhaul::dtensor {

using at::Tensor;

enum class Reduction { kSum, kAvg, kMax, kMin };

// A collective that did not end: another rank failed, did not come or called something else. The
// cause is on another rank, unlike that of an Error from the checks of this rank's tensors.
class CollectiveError : public Error {
 public:
  using Error::Error;
};

// A collective under way. Its tensors may be neither read nor freed before wait() returns.
class [[nodiscard]] Pending {
 public:
  Pending();  // nothing to wait for
  // Waits, and swallows what it would throw. While an exception unwinds this rank it gives the
  // collective up, if it has not begun to move data and the transport can (threads).
  ~Pending();
  Pending(Pending&&) noexcept;
  Pending& operator=(Pending&&) noexcept;  // waits for what it held, as the destructor does

  // Throws CollectiveError that names rank, group, operation and sequence number if the collective
  // fails or does not end within the group's time limit, and who did not arrive where the
  // transport knows. Waiting again does nothing.
  void wait();
  // Whether wait() would return at once.
  bool is_done() const;

 private:
  friend class Communicator;
  struct State;
  explicit Pending(std::unique_ptr<State> state);
  void settle() noexcept;
  std::unique_ptr<State> state_;
};

// Called when a collective failed, with its name and number: what is known of the other ranks, for
// the error's text; empty if nothing.
using Diagnose = std::function<std::string(const std::string& operation)>;

struct CommunicatorState;

// One rank's end of a group; copies share it. All ranks of the group must call the same operations
// in the same order, each rank from one thread at a time. Tensors must be contiguous, of one dtype
// and on one device; dtypes are fp64, fp32, bf16, fp16, int64, int32, uint8 and bool (which moves
// as uint8). Averages want a floating dtype, and bool knows max and min only. Every size may be
// zero. Errors of this rank's arguments are Errors that name operation, axis and rank; the rest are
// CollectiveErrors.
class Communicator {
 public:
  static constexpr std::chrono::milliseconds kDefaultTimeout{300'000};

  // `axis` is the mesh axis that the group runs along, for the log ("tp", "dp_shard"). `log` must
  // outlive the communicator. `global_ranks` has one entry a rank of the backends. `host` moves
  // tensors of the host, `device` those of a device where that takes another transport (gloo and
  // NCCL, c10d's "cpu:gloo,cuda:nccl"); null: the host's moves all.
  Communicator(c10::intrusive_ptr<c10d::Backend> host, c10::intrusive_ptr<c10d::Backend> device,
               std::string axis, std::vector<int> global_ranks, CollectiveLog& log,
               Diagnose diagnose = {});
  // A group of one rank: nothing moves between ranks, nothing is logged.
  static Communicator alone(std::string axis, int global_rank, CollectiveLog& log);

  int rank() const { return rank_; }  // within the group
  int size() const { return size_; }
  const std::string& axis() const;
  const std::vector<int>& global_ranks() const;
  int global_rank() const { return global_ranks()[rank_]; }

  // What its axis runs over, for all copies of this communicator; within a host if nobody says.
  const Link& link() const;
  void set_link(const Link& link);

  // Its name in the log, where another group has the same axis and ranks.
  void set_name(const std::string& name);

  // The time limit of each later collective, for all copies of this communicator.
  void set_timeout(std::chrono::milliseconds timeout);

  // output, of size() times the elements of input, receives the inputs rank after rank. input may
  // be this rank's part of output.
  Pending all_gather(Tensor& output, const Tensor& input) const;
  // input is size() chunks of output's elements; output receives this rank's chunk, reduced.
  Pending reduce_scatter(Tensor& output, const Tensor& input, Reduction reduction) const;
  // In place.
  Pending all_reduce(Tensor& tensor, Reduction reduction) const;
  // Rows (dim 0) of input go to the ranks by input_rows, rows of output come from them by
  // output_rows; both have size() entries and sum to the tensors' rows, whose other dims agree.
  Pending all_to_all(Tensor& output, const Tensor& input, const std::vector<int64_t>& output_rows,
                     const std::vector<int64_t>& input_rows) const;
  // In place, from the group's rank `root`.
  Pending broadcast(Tensor& tensor, int root) const;
  void barrier() const;

 private:
  explicit Communicator(std::shared_ptr<CommunicatorState> state, int rank);
  template <typename Issue>
  Pending start(CollectiveKind kind, const Tensor& input, const Tensor& output,
                const Issue& issue) const;
  std::string where(CollectiveKind kind) const;
  void check_tensor(CollectiveKind kind, const char* what, const Tensor& tensor) const;
  void check_pair(CollectiveKind kind, const Tensor& output, const Tensor& input) const;
  void check_reduction(CollectiveKind kind, const Tensor& tensor, Reduction reduction) const;
  void check_rows(const char* what, const Tensor& tensor, const std::vector<int64_t>& rows) const;

  std::shared_ptr<CommunicatorState> state_;
  int rank_ = 0, size_ = 1;
};

}  // namespace longhaul::dtensor
