// Views and reshapes: the same elements under other dims. A slice stays a slice where the dim that
// is cut goes over into one dim; terms stay terms.
#include <c10/core/WrapDimMinimal.h>

#include "longhaul/dtensor/rules/rules.h"

namespace longhaul::dtensor {
namespace {

constexpr const char* kFile = "longhaul/dtensor/rules/views.cpp";

// Strategies for a view that maps dim d of its input to dim to[d] of each result; -1: a dim that
// must be whole.
std::vector<Strategy> mapped(const OpCall& call, const std::vector<int64_t>& to) {
  std::vector<Strategy> strategies = {replicated(call)};
  for (const auto reduction :
       {Reduction::kSum, Reduction::kAvg, Reduction::kMax, Reduction::kMin}) {
    strategies.push_back(uniform(call, Placement::partial(reduction)));
  }
  for (size_t dim = 0; dim < to.size(); ++dim) {
    if (to[dim] < 0) continue;
    Strategy strategy = uniform(call, Placement::shard(to[dim]));
    strategy.inputs[0] = Placement::shard(static_cast<int64_t>(dim));
    strategies.push_back(strategy);
  }
  return strategies;
}

std::vector<int64_t> identity(int64_t dims) {
  std::vector<int64_t> to(static_cast<size_t>(dims));
  for (size_t i = 0; i < to.size(); ++i) to[i] = static_cast<int64_t>(i);
  return to;
}

// Dims are put together and taken apart within groups of equal numbers of elements. A cut may only
// be in the first dim of a group that is not 1, and must fall between two of its new indices.
std::vector<int64_t> reshaped(at::IntArrayRef from, at::IntArrayRef to, int64_t ranks) {
  std::vector<int64_t> map(from.size(), -1);
  size_t i = 0, j = 0;
  while (i < from.size() && j < to.size()) {
    const size_t first_from = i, first_to = j;
    int64_t left = from[i++], right = to[j++];
    while (left != right) {
      if (left < right && i < from.size()) {
        left *= from[i++];
      } else if (left > right && j < to.size()) {
        right *= to[j++];
      } else {
        return map;  // no elements: nothing to keep
      }
    }
    size_t a = first_from, b = first_to;
    while (a < i && from[a] == 1) ++a;
    while (b < j && to[b] == 1) ++b;
    if (a == i || b == j) continue;
    const bool same = from[a] == to[b];
    if (same || (from[a] % ranks == 0 && to[b] % ranks == 0)) {
      map[a] = static_cast<int64_t>(b);
    }
  }
  return map;
}

std::vector<Strategy> reshape(const OpCall& call, int64_t ranks) {
  return mapped(call, reshaped(call.input(0).sizes(), call.output_sizes[0], ranks));
}

std::vector<Strategy> expand(const OpCall& call, int64_t /*ranks*/) {
  const Tensor& x = call.input(0);
  const auto& sizes = call.output_sizes[0];
  const auto added = static_cast<int64_t>(sizes.size()) - x.dim();
  std::vector<int64_t> to;
  for (int64_t dim = 0; dim < x.dim(); ++dim) {
    to.push_back(x.size(dim) == sizes[static_cast<size_t>(dim + added)] ? dim + added : -1);
  }
  return mapped(call, to);
}

std::vector<Strategy> permute(const OpCall& call, int64_t /*ranks*/) {
  const auto order = call.dims_arg(1);
  std::vector<int64_t> to(order.size());
  for (size_t i = 0; i < order.size(); ++i) {
    to[static_cast<size_t>(order[i])] = static_cast<int64_t>(i);
  }
  return mapped(call, to);
}

std::vector<Strategy> swapped(const OpCall& call, int64_t a, int64_t b) {
  auto to = identity(call.input(0).dim());
  std::swap(to[static_cast<size_t>(a)], to[static_cast<size_t>(b)]);
  return mapped(call, to);
}

std::vector<Strategy> transpose(const OpCall& call, int64_t /*ranks*/) {
  if (call.input(0).dim() == 0) return mapped(call, {});
  return swapped(call, call.dim_arg(1), call.dim_arg(2));
}

std::vector<Strategy> t(const OpCall& call, int64_t /*ranks*/) {
  return call.input(0).dim() < 2 ? mapped(call, identity(call.input(0).dim()))
                                 : swapped(call, 0, 1);
}

std::vector<Strategy> unsqueeze(const OpCall& call, int64_t /*ranks*/) {
  const int64_t dims = call.input(0).dim();
  const int64_t at = c10::maybe_wrap_dim(call.int_arg(1), dims + 1);
  auto to = identity(dims);
  for (auto& dim : to) dim += dim >= at ? 1 : 0;
  return mapped(call, to);
}

std::vector<Strategy> squeeze(const OpCall& call, int64_t /*ranks*/) {
  const Tensor& x = call.input(0);
  std::vector<bool> wanted(static_cast<size_t>(x.dim()), call.args().size() == 1);
  if (call.args().size() > 1) {
    for (const int64_t dim : call.dims_arg(1)) wanted[static_cast<size_t>(dim)] = true;
  }
  std::vector<int64_t> to;
  int64_t next = 0;
  for (int64_t dim = 0; dim < x.dim(); ++dim) {
    const bool asked = wanted[static_cast<size_t>(dim)], dropped = asked && x.size(dim) == 1;
    // One that stays could be 1 in a part, and be dropped there: it must be whole.
    to.push_back(asked ? -1 : next);
    next += dropped ? 0 : 1;
  }
  return mapped(call, to);
}

// All dims but `dim` stay; `dim` must be whole, and is gone from the results if `dropped`.
std::vector<Strategy> along(const OpCall& call, int64_t dim, bool dropped) {
  auto to = identity(call.input(0).dim());
  for (auto& d : to) {
    if (d == dim) {
      d = -1;
    } else if (dropped && d > dim) {
      --d;
    }
  }
  return mapped(call, to);
}

std::vector<Strategy> split(const OpCall& call, int64_t /*ranks*/) {
  return along(call, call.dim_arg(2), false);
}

std::vector<Strategy> slice(const OpCall& call, int64_t /*ranks*/) {
  const int64_t dim = call.dim_arg(1);
  const bool whole = call.output_sizes[0][static_cast<size_t>(dim)] == call.input(0).size(dim);
  // A whole slice with explicit ends would cut the parts by the whole's numbers.
  return whole && call.args()[2].isNone() && call.args()[3].isNone()
             ? mapped(call, identity(call.input(0).dim()))
             : along(call, dim, false);
}

std::vector<Strategy> select(const OpCall& call, int64_t /*ranks*/) {
  return along(call, call.dim_arg(1), true);
}

// The gradient of a slice or a selection: zeros around it. `sizes` are those of the whole.
std::vector<Strategy> slice_backward(const OpCall& call, int64_t /*ranks*/) {
  return along(call, call.dim_arg(2), false);
}

std::vector<Strategy> select_backward(const OpCall& call, int64_t /*ranks*/) {
  const auto dims = static_cast<int64_t>(call.output_sizes[0].size());
  const int64_t at = c10::maybe_wrap_dim(call.int_arg(2), dims);
  auto to = identity(call.input(0).dim());
  for (auto& dim : to) dim += dim >= at ? 1 : 0;
  return mapped(call, to);
}

}  // namespace

void add_view_rules(RuleTable& table) {
  const auto add = [&](const char* name, Rule rule, int size_arg = -1) {
    table[std::string("aten::") + name] = {
        .rule = rule,
        .size_arg = size_arg,
        .file = kFile,
        .whole = "its parts would not be parts of the result: the cut dim changes"};
  };
  add("view", reshape, 1);
  add("_unsafe_view", reshape, 1);
  add("_reshape_copy", reshape, 1);
  add("expand", expand, 1);
  add("permute", permute);
  add("transpose.int", transpose);
  add("t", t);
  add("unsqueeze", unsqueeze);
  add("squeeze", squeeze);
  add("squeeze.dim", squeeze);
  add("squeeze.dims", squeeze);
  add("split.Tensor", split);
  add("split_with_sizes", split);
  add("slice.Tensor", slice);
  add("select.int", select);
  add("unbind.int", select);
  add("slice_backward", slice_backward, 1);
  add("select_backward", select_backward, 1);
}

}  // namespace longhaul::dtensor
