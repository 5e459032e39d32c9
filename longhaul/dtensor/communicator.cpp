#include "longhaul/dtensor/communicator.h"

#include <ATen/core/grad_mode.h>

#include <atomic>
#include <exception>
#include <mutex>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "longhaul/ops/common.h"

namespace longhaul::dtensor {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

struct CommunicatorState {
  // The one that takes tensors of the device; the host's for an undefined one.
  c10d::Backend& backend_for(const Tensor& tensor) const {
    return *(device && tensor.defined() && !tensor.is_cpu() ? device : host);
  }
  bool is_alone() const { return !host; }

  c10::intrusive_ptr<c10d::Backend> host, device;  // null for a group of one
  std::string axis;
  std::vector<int> global_ranks;
  std::shared_ptr<const CollectiveGroup> group;  // for the log
  Link link = kWithinHost;
  CollectiveLog* log;
  Diagnose diagnose;
  std::atomic<std::chrono::milliseconds> timeout{Communicator::kDefaultTimeout};
  std::atomic<uint64_t> sequence{0};
};

namespace {

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// What moves: the same memory without autograd, flat, bool as uint8.
Tensor carried(const Tensor& tensor) {
  const Tensor flat = tensor.variable_data().view(-1);
  return flat.scalar_type() == at::kBool ? flat.view(at::kByte) : flat;
}

bool is_gloo(const c10d::Backend& backend) { return backend.getBackendName() == "gloo"; }

// Gloo knows no average: a sum, divided in Pending::wait().
bool divides_later(const c10d::Backend& backend, Reduction reduction) {
  return reduction == Reduction::kAvg && is_gloo(backend);
}

c10d::ReduceOp::RedOpType c10d_reduction(const c10d::Backend& backend, Reduction reduction) {
  switch (reduction) {
    case Reduction::kSum:
      break;
    case Reduction::kAvg:
      return divides_later(backend, reduction) ? c10d::ReduceOp::SUM : c10d::ReduceOp::AVG;
    case Reduction::kMax:
      return c10d::ReduceOp::MAX;
    case Reduction::kMin:
      return c10d::ReduceOp::MIN;
  }
  return c10d::ReduceOp::SUM;
}

template <typename Options>
Options with_timeout(const CommunicatorState& state) {
  Options options;
  options.timeout = state.timeout;
  return options;
}

// As it starts a collective, c10d's gloo notes the group in the process's one flight recorder,
// which libtorch 2.11 does without a lock (FlightRecorder::recordWithResetEnabled, all_pg_status_):
// rank threads take turns, or it crashes. Starting never waits for other ranks.
std::unique_lock<std::mutex> lock_gloo() {
  static std::mutex mutex;
  return std::unique_lock(mutex);
}

// The text of an exception without the addresses that c10 appends.
std::string text_of(const std::exception& error) {
  const auto* c10_error = dynamic_cast<const c10::Error*>(&error);
  return c10_error ? c10_error->what_without_backtrace() : error.what();
}

// A collective under way.
struct Started {
  int rank;
  CollectiveKind kind;
  uint64_t sequence, ticket;
  int64_t start_ns;
};

[[noreturn]] void throw_failed(const CommunicatorState& state, const Started& started,
                               const std::exception& error) {
  state.log->fail(started.ticket);
  const std::string operation = fmt::format("{} #{}", name_of(started.kind), started.sequence);
  const std::string others = state.diagnose ? state.diagnose(operation) : "";
  throw CollectiveError(fmt::format("rank {}: {} on axis {} (ranks {}) failed: {}{}{}",
                                    state.global_ranks[started.rank], operation, state.axis,
                                    fmt::join(state.global_ranks, ", "), text_of(error),
                                    others.empty() ? "" : "; ", others));
}

bool is_supported(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
    case at::kFloat:
    case at::kBFloat16:
    case at::kHalf:
    case at::kLong:
    case at::kInt:
    case at::kByte:
    case at::kBool:
      return true;
    default:
      return false;
  }
}

}  // namespace

struct Pending::State {
  std::shared_ptr<CommunicatorState> group;
  Started started;
  Tensor input, output;  // kept alive
  WorkPtr work;
  Tensor to_average;  // divided by the group's size at the end
};

Pending::Pending() = default;
Pending::Pending(std::unique_ptr<State> state) : state_(std::move(state)) {}
Pending::Pending(Pending&&) noexcept = default;
Pending::~Pending() { settle(); }

Pending& Pending::operator=(Pending&& other) noexcept {
  settle();
  state_ = std::move(other.state_);
  return *this;
}

void Pending::settle() noexcept {
  if (!state_) return;
  try {
    // Unwinding: the others may never come, because this rank won't get to where they wait. Not
    // every backend can give up.
    if (std::uncaught_exceptions() > 0) state_->work->abort();
  } catch (const std::exception&) {
  }
  try {
    wait();
  } catch (const std::exception&) {
  }
}

void Pending::wait() {
  if (!state_) return;
  const std::unique_ptr<State> state = std::move(state_);
  const int64_t waits_from = now_ns();
  try {
    state->work->wait();
  } catch (const std::exception& error) {
    throw_failed(*state->group, state->started, error);
  }
  if (state->to_average.defined()) {
    at::NoGradGuard no_grad;
    state->to_average.div_(static_cast<int64_t>(state->group->global_ranks.size()));
  }
  const int64_t end_ns = now_ns();
  state->group->log->finish(state->started.ticket, end_ns);
  state->group->log->add_time(state->started.kind, state->group->axis,
                              end_ns - state->started.start_ns, end_ns - waits_from);
}

bool Pending::is_done() const { return !state_ || state_->work->isCompleted(); }

Communicator::Communicator(std::shared_ptr<CommunicatorState> state, int rank)
    : state_(std::move(state)), rank_(rank), size_(narrow<int>(state_->global_ranks.size())) {}

Communicator::Communicator(c10::intrusive_ptr<c10d::Backend> host,
                           c10::intrusive_ptr<c10d::Backend> device, std::string axis,
                           std::vector<int> global_ranks, CollectiveLog& log, Diagnose diagnose)
    : Communicator(std::make_shared<CommunicatorState>(), host->getRank()) {
  size_ = host->getSize();
  LONGHAUL_CHECK(global_ranks.size() == static_cast<size_t>(size_),
                 "group of axis {}: {} global ranks for a backend of {} ranks", axis,
                 global_ranks.size(), size_);
  state_->host = std::move(host);
  state_->device = std::move(device);
  state_->axis = std::move(axis);
  state_->global_ranks = std::move(global_ranks);
  state_->log = &log;
  set_name(fmt::format("{}:{}", state_->axis, fmt::join(state_->global_ranks, ",")));
  state_->diagnose = std::move(diagnose);
}

Communicator Communicator::alone(std::string axis, int global_rank, CollectiveLog& log) {
  auto state = std::make_shared<CommunicatorState>();
  state->axis = std::move(axis);
  state->global_ranks = {global_rank};
  state->log = &log;
  return Communicator(std::move(state), 0);
}

const std::string& Communicator::axis() const { return state_->axis; }
const std::vector<int>& Communicator::global_ranks() const { return state_->global_ranks; }
const Link& Communicator::link() const { return state_->link; }
void Communicator::set_link(const Link& link) { state_->link = link; }

void Communicator::set_name(const std::string& name) {
  state_->group = std::make_shared<const CollectiveGroup>(
      CollectiveGroup{name, state_->axis, state_->global_ranks});
}

void Communicator::set_timeout(std::chrono::milliseconds timeout) {
  LONGHAUL_CHECK(timeout.count() > 0, "time limit of {} ms on axis {}; it must be positive",
                 timeout.count(), axis());
  state_->timeout = timeout;
  // NCCL takes the limit of its group, whatever the options of a collective say.
  if (state_->device) state_->device->setTimeout(timeout);
}

std::string Communicator::where(CollectiveKind kind) const {
  return fmt::format("rank {}: {} on axis {}", global_rank(), name_of(kind), axis());
}

void Communicator::check_tensor(CollectiveKind kind, const char* what, const Tensor& tensor) const {
  LONGHAUL_CHECK(tensor.defined(), "{}: {} is undefined", where(kind), what);
  LONGHAUL_CHECK(is_supported(tensor.scalar_type()),
                 "{}: {} has dtype {}; expected fp64, fp32, bf16, fp16, int64, int32, uint8 or "
                 "bool, so convert it first",
                 where(kind), what, c10::toString(tensor.scalar_type()));
  LONGHAUL_CHECK(tensor.is_contiguous(), "{}: {} ({}) is not contiguous; call contiguous() on it",
                 where(kind), what, ops::shape_text(tensor));
}

void Communicator::check_pair(CollectiveKind kind, const Tensor& output,
                              const Tensor& input) const {
  check_tensor(kind, "output", output);
  check_tensor(kind, "input", input);
  LONGHAUL_CHECK(output.scalar_type() == input.scalar_type() && output.device() == input.device(),
                 "{}: output is {} on {}, input is {} on {}; they must agree", where(kind),
                 c10::toString(output.scalar_type()), output.device().str(),
                 c10::toString(input.scalar_type()), input.device().str());
}

void Communicator::check_reduction(CollectiveKind kind, const Tensor& tensor,
                                   Reduction reduction) const {
  LONGHAUL_CHECK(reduction != Reduction::kAvg || tensor.is_floating_point(),
                 "{}: an average of {}; convert it to a floating dtype or take the sum",
                 where(kind), c10::toString(tensor.scalar_type()));
  LONGHAUL_CHECK(tensor.scalar_type() != at::kBool || reduction == Reduction::kMax ||
                     reduction == Reduction::kMin,
                 "{}: a sum of bool; take the maximum (any) or the minimum (all)", where(kind));
}

void Communicator::check_rows(const char* what, const Tensor& tensor,
                              const std::vector<int64_t>& rows) const {
  constexpr auto kKind = CollectiveKind::kAllToAll;
  LONGHAUL_CHECK(tensor.dim() > 0, "{}: {} is a scalar; it must have rows", where(kKind), what);
  LONGHAUL_CHECK(rows.size() == static_cast<size_t>(size_),
                 "{}: {}_rows has {} entries, expected one a rank, {}", where(kKind), what,
                 rows.size(), size_);
  int64_t sum = 0;
  for (const int64_t count : rows) {
    LONGHAUL_CHECK(count >= 0, "{}: {}_rows has a negative entry {}", where(kKind), what, count);
    sum += count;
  }
  LONGHAUL_CHECK(sum == tensor.size(0), "{}: {}_rows sum to {}, but {} has {} rows", where(kKind),
                 what, sum, what, tensor.size(0));
}

// Numbers, logs and issues a collective. `issue` calls the backend.
template <typename Issue>
Pending Communicator::start(CollectiveKind kind, const Tensor& input, const Tensor& output,
                            const Issue& issue) const {
  CollectiveRecord record{.kind = kind, .axis = state_->axis, .group = state_->group};
  if (input.defined()) {
    record.bytes = static_cast<int64_t>(input.nbytes());
    record.sizes = input.sizes().vec();
    record.dtype = c10::getDtypeNames(input.scalar_type()).first;
  }
  record.sequence = ++state_->sequence;
  record.start_ns = now_ns();
  Started started{rank_, kind, record.sequence, 0, record.start_ns};
  started.ticket = state_->log->append(std::move(record));
  auto pending =
      std::make_unique<Pending::State>(Pending::State{state_, started, input, output, {}, {}});
  try {
    c10d::Backend& backend = state_->backend_for(output);
    std::unique_lock<std::mutex> lock;
    if (is_gloo(backend)) lock = lock_gloo();
    pending->work = issue(backend);
  } catch (const std::exception& error) {
    throw_failed(*state_, pending->started, error);
  }
  return Pending(std::move(pending));
}

// A group of one: the output is the input.
static Pending copy_alone(Tensor& output, const Tensor& input) {
  at::NoGradGuard no_grad;
  if (output.numel() > 0 && output.const_data_ptr() != input.const_data_ptr()) {
    carried(output).copy_(carried(input));
  }
  return {};
}

Pending Communicator::all_gather(Tensor& output, const Tensor& input) const {
  constexpr auto kKind = CollectiveKind::kAllGather;
  check_pair(kKind, output, input);
  LONGHAUL_CHECK(output.numel() == size_ * input.numel(),
                 "{}: output has {} elements, expected {} = {} ranks x {} of the input",
                 where(kKind), output.numel(), size_ * input.numel(), size_, input.numel());
  if (state_->is_alone()) return copy_alone(output, input);
  Tensor to = carried(output), from = carried(input);
  return start(kKind, input, output, [&](c10d::Backend& backend) {
    return backend._allgather_base(to, from, with_timeout<c10d::AllgatherOptions>(*state_));
  });
}

Pending Communicator::reduce_scatter(Tensor& output, const Tensor& input,
                                     Reduction reduction) const {
  constexpr auto kKind = CollectiveKind::kReduceScatter;
  check_pair(kKind, output, input);
  check_reduction(kKind, input, reduction);
  LONGHAUL_CHECK(input.numel() == size_ * output.numel(),
                 "{}: input has {} elements, expected {} = {} ranks x {} of the output",
                 where(kKind), input.numel(), size_ * output.numel(), size_, output.numel());
  if (state_->is_alone()) return copy_alone(output, input);
  Tensor to = carried(output), from = carried(input);
  auto options = with_timeout<c10d::ReduceScatterOptions>(*state_);
  options.reduceOp = c10d_reduction(state_->backend_for(output), reduction);
  Pending pending = start(kKind, input, output, [&](c10d::Backend& backend) {
    return backend._reduce_scatter_base(to, from, options);
  });
  if (divides_later(state_->backend_for(output), reduction)) pending.state_->to_average = to;
  return pending;
}

Pending Communicator::all_reduce(Tensor& tensor, Reduction reduction) const {
  constexpr auto kKind = CollectiveKind::kAllReduce;
  check_tensor(kKind, "the tensor", tensor);
  check_reduction(kKind, tensor, reduction);
  if (state_->is_alone()) return {};
  std::vector<Tensor> tensors = {carried(tensor)};
  auto options = with_timeout<c10d::AllreduceOptions>(*state_);
  options.reduceOp = c10d_reduction(state_->backend_for(tensor), reduction);
  Pending pending = start(kKind, tensor, tensor, [&](c10d::Backend& backend) {
    return backend.allreduce(tensors, options);
  });
  if (divides_later(state_->backend_for(tensor), reduction)) {
    pending.state_->to_average = tensors[0];
  }
  return pending;
}

Pending Communicator::all_to_all(Tensor& output, const Tensor& input,
                                 const std::vector<int64_t>& output_rows,
                                 const std::vector<int64_t>& input_rows) const {
  constexpr auto kKind = CollectiveKind::kAllToAll;
  check_pair(kKind, output, input);
  check_rows("output", output, output_rows);
  check_rows("input", input, input_rows);
  LONGHAUL_CHECK(output.sizes().slice(1) == input.sizes().slice(1),
                 "{}: output is {}, input is {}; their dims after the first must agree",
                 where(kKind), ops::shape_text(output), ops::shape_text(input));
  if (state_->is_alone()) return copy_alone(output, input);
  Tensor to = carried(output), from = carried(input);
  const int64_t row = c10::multiply_integers(input.sizes().slice(1));
  std::vector<int64_t> to_counts = output_rows, from_counts = input_rows;
  for (int i = 0; i < size_; ++i) {
    to_counts[i] *= row;
    from_counts[i] *= row;
  }
  return start(kKind, input, output, [&](c10d::Backend& backend) {
    return backend.alltoall_base(to, from, to_counts, from_counts,
                                 with_timeout<c10d::AllToAllOptions>(*state_));
  });
}

Pending Communicator::broadcast(Tensor& tensor, int root) const {
  constexpr auto kKind = CollectiveKind::kBroadcast;
  check_tensor(kKind, "the tensor", tensor);
  LONGHAUL_CHECK(root >= 0 && root < size_, "{}: root {} is not a rank of a group of {}",
                 where(kKind), root, size_);
  if (state_->is_alone()) return {};
  std::vector<Tensor> tensors = {carried(tensor)};
  auto options = with_timeout<c10d::BroadcastOptions>(*state_);
  options.rootRank = root;
  return start(kKind, tensor, tensor,
               [&](c10d::Backend& backend) { return backend.broadcast(tensors, options); });
}

void Communicator::barrier() const {
  if (state_->is_alone()) return;
  start(CollectiveKind::kBarrier, {}, {}, [&](c10d::Backend& backend) {
    return backend.barrier(with_timeout<c10d::BarrierOptions>(*state_));
  }).wait();
}

}  // namespace longhaul::dtensor
