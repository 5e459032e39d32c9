// Operators that reduce, scan or normalise along dims. A cut of a reduced dim leaves terms where
// the reduction can be made of parts; a dim that is scanned or normalised must be whole.
#include <ATen/ATen.h>

#include <algorithm>

#include "longhaul/dtensor/dtensor.h"
#include "longhaul/dtensor/rules/rules.h"

namespace longhaul::dtensor {
namespace {

constexpr const char* kFile = "longhaul/dtensor/rules/reductions.cpp";

// Cuts of the dims outside `dims`; `kept`: the results keep the reduced dims.
std::vector<Strategy> outside(const OpCall& call, const std::vector<int64_t>& dims, bool kept) {
  std::vector<Strategy> strategies = {replicated(call)};
  int64_t out = 0;
  for (int64_t dim = 0; dim < call.input(0).dim(); ++dim) {
    const bool reduced = std::find(dims.begin(), dims.end(), dim) != dims.end();
    if (!reduced) {
      Strategy strategy = uniform(call, Placement::shard(dim));
      for (auto& placement : strategy.outputs) placement = Placement::shard(out);
      strategies.push_back(strategy);
    }
    out += !reduced || kept ? 1 : 0;
  }
  return strategies;
}

// And cuts of the dims inside, whose results are `reduction`'s terms. Equal parts only if `equal`:
// else a part may be empty, or weigh less.
std::vector<Strategy> reduced(const OpCall& call, const std::vector<int64_t>& dims, bool kept,
                              Reduction reduction, bool equal, int64_t ranks) {
  auto strategies = outside(call, dims, kept);
  for (const int64_t dim : dims) {
    if (equal && call.input(0).size(dim) % ranks != 0) continue;
    Strategy strategy = uniform(call, Placement::partial(reduction));
    strategy.inputs[0] = Placement::shard(dim);
    strategies.push_back(strategy);
  }
  return strategies;
}

std::vector<int64_t> every_dim(const OpCall& call) {
  std::vector<int64_t> dims;
  for (int64_t dim = 0; dim < call.input(0).dim(); ++dim) dims.push_back(dim);
  return dims;
}

std::vector<Strategy> sum_all(const OpCall& call, int64_t ranks) {
  auto strategies = reduced(call, every_dim(call), false, Reduction::kSum, false, ranks);
  strategies.push_back(uniform(call, Placement::partial()));
  return strategies;
}

std::vector<Strategy> sum(const OpCall& call, int64_t ranks) {
  auto strategies =
      reduced(call, call.dims_arg(1), call.bool_arg(2), Reduction::kSum, false, ranks);
  strategies.push_back(uniform(call, Placement::partial()));
  return strategies;
}

std::vector<Strategy> mean_all(const OpCall& call, int64_t ranks) {
  return reduced(call, every_dim(call), false, Reduction::kAvg, true, ranks);
}

std::vector<Strategy> mean(const OpCall& call, int64_t ranks) {
  return reduced(call, call.dims_arg(1), call.bool_arg(2), Reduction::kAvg, true, ranks);
}

std::vector<Strategy> amax(const OpCall& call, int64_t ranks) {
  return reduced(call, call.dims_arg(1), call.bool_arg(2), Reduction::kMax, true, ranks);
}

std::vector<Strategy> amin(const OpCall& call, int64_t ranks) {
  return reduced(call, call.dims_arg(1), call.bool_arg(2), Reduction::kMin, true, ranks);
}

std::vector<Strategy> max_all(const OpCall& call, int64_t ranks) {
  return reduced(call, every_dim(call), false, Reduction::kMax, true, ranks);
}

std::vector<Strategy> min_all(const OpCall& call, int64_t ranks) {
  return reduced(call, every_dim(call), false, Reduction::kMin, true, ranks);
}

// Any of a part's elements, or all of them, make a maximum or a minimum of truths; an empty part
// has the neutral one.
template <bool kAny>
std::vector<Strategy> truth(const OpCall& call, int64_t ranks) {
  constexpr Reduction kTruth = kAny ? Reduction::kMax : Reduction::kMin;
  const bool of_dims = call.args().size() > 1;
  auto strategies = reduced(call, of_dims ? call.dims_arg(1) : every_dim(call),
                            of_dims && call.bool_arg(2), kTruth, /*equal=*/false, ranks);
  if (call.input(0).scalar_type() == at::kBool) {
    strategies.push_back(uniform(call, Placement::partial(kTruth)));
  }
  return strategies;
}

// Dims in argument 1, keepdim in argument 2; nothing to be made of parts.
std::vector<Strategy> whole_dims(const OpCall& call, int64_t /*ranks*/) {
  return outside(call, call.dims_arg(1), call.bool_arg(2));
}

// A dim in argument `arg`, which the results keep.
template <size_t arg>
std::vector<Strategy> along(const OpCall& call, int64_t /*ranks*/) {
  return outside(call, {call.dim_arg(arg)}, true);
}

std::vector<Strategy> flip(const OpCall& call, int64_t /*ranks*/) {
  auto strategies = outside(call, call.dims_arg(1), true);
  strategies.push_back(uniform(call, Placement::partial()));
  return strategies;
}

// The last two dims are one matrix.
std::vector<Strategy> triangle(const OpCall& call, int64_t /*ranks*/) {
  const int64_t dims = call.input(0).dim();
  auto strategies = outside(call, {dims - 2, dims - 1}, true);
  strategies.push_back(uniform(call, Placement::partial()));
  return strategies;
}

// A number for the program: all ranks must ask for it.
void local_scalar(const c10::OperatorHandle& /*op*/, torch::jit::Stack& stack) {
  const Tensor x = torch::jit::pop(stack).toTensor();
  stack.emplace_back(full_tensor(x).item());
}

}  // namespace

void add_reduction_rules(RuleTable& table) {
  const auto add = [&](Rule rule, std::initializer_list<const char*> names,
                       const char* whole = nullptr) {
    for (const char* name : names) {
      table[std::string("aten::") + name] = {.rule = rule, .file = kFile, .whole = whole};
    }
  };
  const char* equal = "parts of a reduced dim must be equally long";
  const char* one_piece = "a dim that is searched, scanned, sorted or normalised must be whole";
  add(sum_all, {"sum"});
  add(sum, {"sum.dim_IntList"});
  add(mean_all, {"mean"}, equal);
  add(mean, {"mean.dim"}, equal);
  add(amax, {"amax"}, equal);
  add(amin, {"amin"}, equal);
  table["aten::max"] = {.rule = max_all, .layout = Layout::kNumber, .file = kFile, .whole = equal};
  table["aten::min"] = {.rule = min_all, .layout = Layout::kNumber, .file = kFile, .whole = equal};
  add(truth<true>, {"any", "any.dim", "any.dims"});
  add(truth<false>, {"all", "all.dim", "all.dims"});
  add(whole_dims, {"logsumexp", "max.dim", "min.dim", "argmax", "argmin", "prod.dim_int"},
      one_piece);
  add(along<1>, {"_softmax", "_log_softmax", "cumsum", "cumprod", "sort"}, one_piece);
  table["aten::_local_scalar_dense"] = {.handler = local_scalar, .file = kFile};
  table["aten::flip"] = {.rule = flip,
                         .layout = Layout::kAsSum,
                         .file = kFile,
                         .whole = "what comes last must come first"};
  add(along<2>, {"_softmax_backward_data", "_log_softmax_backward_data", "topk", "sort.stable"},
      one_piece);
  add(triangle, {"tril", "triu"}, "a triangle is of a whole matrix");
}

}  // namespace longhaul::dtensor
