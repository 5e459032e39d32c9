#include "longhaul/dtensor/redistribute.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <limits>
#include <optional>

#include "longhaul/base/error.h"

namespace longhaul::dtensor {
namespace {

// Zeros behind x along dim 0, up to `rows`.
Tensor padded(const Tensor& x, int64_t rows) {
  if (x.size(0) == rows) return x;
  auto sizes = x.sizes().vec();
  sizes[0] = rows - x.size(0);
  return at::cat({x, at::zeros(sizes, x.options())}, 0);
}

// The tensor with `dim` first, and back.
Tensor dim_first(const Tensor& x, int64_t dim) { return x.movedim(dim, 0).contiguous(); }
Tensor dim_back(const Tensor& x, int64_t dim) { return x.movedim(0, dim).contiguous(); }

// `total` is the size of dim over the ranks of the group.
Tensor gather_dim(const Tensor& local, int64_t dim, int64_t total, const Communicator& group) {
  const int64_t piece = ceil_div(total, group.size());
  const Tensor mine = padded(dim_first(local, dim), piece);
  auto sizes = mine.sizes().vec();
  sizes[0] = piece * group.size();
  Tensor all = at::empty(sizes, mine.options());
  group.all_gather(all, mine).wait();
  // Pieces before the last filled one are full, so the padding is at the end.
  return dim_back(all.narrow(0, 0, total), dim);
}

Tensor cut_dim(const Tensor& local, int64_t dim, const Communicator& group) {
  const Slice slice = slice_of(local.size(dim), group.size(), group.rank());
  return local.narrow(dim, slice.start, slice.length).clone(at::MemoryFormat::Contiguous);
}

Tensor reduce_dim(const Tensor& local, int64_t dim, Reduction reduction,
                  const Communicator& group) {
  const int64_t total = local.size(dim), piece = ceil_div(total, group.size());
  const Tensor terms = padded(dim_first(local, dim), piece * group.size());
  auto sizes = terms.sizes().vec();
  sizes[0] = piece;
  Tensor mine = at::empty(sizes, terms.options());
  group.reduce_scatter(mine, terms, reduction).wait();
  return dim_back(mine.narrow(0, 0, slice_of(total, group.size(), group.rank()).length), dim);
}

Tensor reduce_all(const Tensor& local, Reduction reduction, const Communicator& group) {
  Tensor sum = local.clone(at::MemoryFormat::Contiguous);
  group.all_reduce(sum, reduction).wait();
  return sum;
}

// From slices of `from_dim` (of `from_total` in all) to slices of `to_dim`.
Tensor exchange_dims(const Tensor& local, int64_t from_dim, int64_t from_total, int64_t to_dim,
                     const Communicator& group) {
  const int64_t ranks = group.size();
  std::vector<Tensor> parts;
  std::vector<int64_t> sent, received;
  std::vector<std::vector<int64_t>> received_sizes;
  const int64_t to_total = local.size(to_dim);
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const Slice slice = slice_of(to_total, ranks, rank);
    parts.push_back(local.narrow(to_dim, slice.start, slice.length).reshape({-1}));
    sent.push_back(parts.back().numel());
    auto sizes = local.sizes().vec();
    sizes[static_cast<size_t>(from_dim)] = slice_of(from_total, ranks, rank).length;
    sizes[static_cast<size_t>(to_dim)] = slice_of(to_total, ranks, group.rank()).length;
    received.push_back(c10::multiply_integers(sizes));
    received_sizes.push_back(std::move(sizes));
  }
  const Tensor input = at::cat(parts);
  int64_t total = 0;
  for (const int64_t n : received) total += n;
  Tensor output = at::empty({total}, local.options());
  group.all_to_all(output, input, received, sent).wait();
  auto pieces = output.split_with_sizes(received);
  for (size_t i = 0; i < pieces.size(); ++i) pieces[i] = pieces[i].view(received_sizes[i]);
  return at::cat(pieces, from_dim);
}

// The size of `dim` over the ranks of axis i: what the axes before it leave of the whole.
int64_t total_before(const DeviceMesh& mesh, at::IntArrayRef global_sizes,
                     const Placements& placements, int i, int64_t dim) {
  int64_t total = global_sizes[static_cast<size_t>(dim)];
  for (int j = 0; j < i; ++j) {
    if (placements[static_cast<size_t>(j)].is_shard(dim)) {
      total = slice_of(total, mesh.axis(j).size(), mesh.axis(j).rank()).length;
    }
  }
  return total;
}

Tensor step(const Tensor& local, int64_t from_total, const Placement& from, const Placement& to,
            const Communicator& group) {
  if (from.is_partial() && to.is_replicate()) return reduce_all(local, from.reduction(), group);
  if (from.is_partial() && to.is_shard()) {
    return reduce_dim(local, to.dim(), from.reduction(), group);
  }
  if (from.is_shard() && to.is_replicate()) {
    return gather_dim(local, from.dim(), from_total, group);
  }
  if (from.is_shard() && to.is_shard()) {
    return exchange_dims(local, from.dim(), from_total, to.dim(), group);
  }
  LONGHAUL_CHECK(from.is_replicate() && to.is_shard(), "cannot make {} out of {} (axis {})",
                 to.text(), from.text(), group.axis());
  return cut_dim(local, to.dim(), group);
}

// --- the order of the axes' steps --------------------------------------------------------------

// An axis changes its slices of a dim only while no later axis cuts them further, and cuts a dim
// only when every earlier axis is done with it.

bool cut_by_later(const Placements& now, size_t axis, int64_t dim) {
  for (size_t j = axis + 1; j < now.size(); ++j) {
    if (now[j].is_shard(dim)) return true;
  }
  return false;
}

bool changed_by_earlier(const Placements& now, const Placements& to, size_t axis, int64_t dim) {
  for (size_t j = 0; j < axis; ++j) {
    if (now[j] != to[j] && (now[j].is_shard(dim) || to[j].is_shard(dim))) return true;
  }
  return false;
}

bool may_change(const Placements& now, const Placements& to, size_t axis) {
  if (now[axis] == to[axis]) return false;
  if (now[axis].is_shard() && cut_by_later(now, axis, now[axis].dim())) return false;
  return !to[axis].is_shard() || (!cut_by_later(now, axis, to[axis].dim()) &&
                                  !changed_by_earlier(now, to, axis, to[axis].dim()));
}

// The smaller, the earlier: cuts (on fast axes first), what keeps the part's size, what puts parts
// together (on slow axes first).
double turn_of(const Placement& from, const Placement& to, const Link& link) {
  if (!from.is_shard() && to.is_shard()) return -link.bytes_per_us;
  if (from.is_shard() && !to.is_shard()) return link.bytes_per_us;
  return 0;
}

struct Move {
  size_t axis;
  Placement to;
};

// What comes next; nullopt: all is done.
std::optional<Move> next_move(const DeviceMesh& mesh, const Placements& now, const Placements& to) {
  std::optional<Move> best;
  double first = std::numeric_limits<double>::infinity();
  for (size_t i = now.size(); i-- > 0;) {
    if (!may_change(now, to, i)) continue;
    const double turn = turn_of(now[i], to[i], mesh.axis(static_cast<int>(i)).link());
    if (turn >= first) continue;
    first = turn;
    best = Move{i, to[i]};
  }
  if (best || now == to) return best;
  // Slices within slices that are to change: they are put together, and cut again later.
  for (size_t i = now.size(); i-- > 0;) {
    if (now[i].is_shard() && changed_by_earlier(now, to, i, now[i].dim())) {
      return Move{i, Placement::replicate()};
    }
  }
  LONGHAUL_CHECK(false, "no way from {} to {}", text_of(now), text_of(to));
}

}  // namespace

Tensor redistribute_local(const Tensor& local, at::IntArrayRef global_sizes, const DeviceMesh& mesh,
                          const Placements& from, const Placements& to) {
  if (from == to) return local;
  const at::NoGradGuard no_grad;
  Placements now = from;
  Tensor x = local;
  while (const auto move = next_move(mesh, now, to)) {
    const auto [i, wanted] = *move;
    const Communicator& group = mesh.axis(static_cast<int>(i));
    const int64_t total =
        now[i].is_shard() ? total_before(mesh, global_sizes, now, static_cast<int>(i), now[i].dim())
                          : 0;
    if (group.size() > 1) x = step(x, total, now[i], wanted, group);
    now[i] = wanted;
  }
  return x;
}

const char* first_collective(const DeviceMesh& mesh, const Placements& from, const Placements& to) {
  Placements now = from;
  while (const auto move = next_move(mesh, now, to)) {
    const Placement& before = now[move->axis];
    if (before.is_partial()) return move->to.is_shard() ? "reduce_scatter" : "all_reduce";
    if (before.is_shard()) return move->to.is_shard() ? "all_to_all" : "all_gather";
    now[move->axis] = move->to;
  }
  return nullptr;
}

double redistribute_cost(int64_t bytes, int64_t ranks, const Link& link, const Placement& from,
                         const Placement& to) {
  if (from == to || ranks == 1) return 0;
  const auto whole = static_cast<double>(bytes), n = static_cast<double>(ranks);
  const double share = (n - 1) / n;
  if (to.is_partial()) return std::numeric_limits<double>::infinity();
  if (from.is_replicate()) return whole / n * 1e-3 / kWithinHost.bytes_per_us;
  const double sent = from.is_partial() ? whole * share * (to.is_replicate() ? 2 : 1)
                                        : whole * share / (to.is_replicate() ? 1 : n);
  return link.latency_us + sent / link.bytes_per_us;
}

}  // namespace longhaul::dtensor
