// Joining, gathering, scattering and looking up. The dim that is joined or indexed must be whole.
#include <ATen/ATen.h>
#include <c10/core/WrapDimMinimal.h>
#include <torch/library.h>

#include "longhaul/dtensor/rules/rules.h"

namespace longhaul::dtensor {
namespace {

Placement whole() { return Placement::replicate(); }
Placement cut(int64_t dim) { return Placement::shard(dim); }

std::vector<Strategy> cat(const OpCall& call, int64_t /*ranks*/) {
  std::vector<Strategy> strategies = {replicated(call), uniform(call, Placement::partial())};
  const int64_t dim = c10::maybe_wrap_dim(call.int_arg(1), call.input(0).dim());
  for (int64_t d = 0; d < call.input(0).dim(); ++d) {
    if (d != dim) strategies.push_back(uniform(call, cut(d)));
  }
  return strategies;
}

std::vector<Strategy> stack(const OpCall& call, int64_t /*ranks*/) {
  std::vector<Strategy> strategies = {replicated(call), uniform(call, Placement::partial())};
  const int64_t dims = call.input(0).dim(), dim = c10::maybe_wrap_dim(call.int_arg(1), dims + 1);
  for (int64_t d = 0; d < dims; ++d) {
    Strategy strategy = uniform(call, cut(d));
    strategy.outputs[0] = cut(d + (d >= dim ? 1 : 0));
    strategies.push_back(strategy);
  }
  return strategies;
}

// self, index and perhaps src of one number of dims, all cut alike: where they are equally long, or
// index and src would not go with the slice of self.
std::vector<Strategy> with_index(const OpCall& call, int64_t /*ranks*/) {
  std::vector<Strategy> strategies = {replicated(call)};
  const int64_t dim = call.dim_arg(1);
  for (int64_t d = 0; d < call.input(0).dim(); ++d) {
    bool equal = d != dim;
    for (size_t i = 1; equal && i < call.num_inputs(); ++i) {
      equal = call.input(i).size(d) == call.input(0).size(d);
    }
    if (equal) strategies.push_back(uniform(call, cut(d)));
  }
  return strategies;
}

std::vector<Strategy> index_select(const OpCall& call, int64_t /*ranks*/) {
  std::vector<Strategy> strategies = {replicated(call)};
  const int64_t dim = call.dim_arg(1);
  strategies.push_back({{whole(), cut(0)}, {cut(dim)}});
  for (int64_t d = 0; d < call.input(0).dim(); ++d) {
    if (d != dim) strategies.push_back({{cut(d), whole()}, {cut(d)}});
  }
  return strategies;
}

// A table and ids: slices of the ids, or slices of the table's columns. Slices of its rows are
// longhaul_model::embedding's.
std::vector<Strategy> embedding(const OpCall& call, int64_t /*ranks*/) {
  const int64_t dims = call.input(1).dim();
  std::vector<Strategy> strategies = {replicated(call), {{cut(1), whole()}, {cut(dims)}}};
  for (int64_t d = 0; d < dims; ++d) strategies.push_back({{whole(), cut(d)}, {cut(d)}});
  return strategies;
}

// dy, ids: each slice of the ids gives a term of the table's gradient.
std::vector<Strategy> embedding_backward(const OpCall& call, int64_t /*ranks*/) {
  const int64_t dims = call.input(1).dim();
  std::vector<Strategy> strategies = {replicated(call),
                                      {{cut(dims), whole()}, {cut(1)}},
                                      {{Placement::partial(), whole()}, {Placement::partial()}}};
  for (int64_t d = 0; d < dims; ++d) {
    strategies.push_back({{cut(d), cut(d)}, {Placement::partial()}});
  }
  return strategies;
}

// The gradient of values that were chosen along a dim (topk, sort, max and min), at their indices;
// autograd's own starts from zeros that are a plain tensor.
Tensor value_selecting_reduction_backward(const Tensor& grad, int64_t dim, const Tensor& indices,
                                          c10::SymIntArrayRef sizes, bool keepdim) {
  const auto with_dim = [&](const Tensor& x) {
    return keepdim || sizes.empty() ? x : x.unsqueeze(dim);
  };
  return grad.new_zeros(C10_AS_INTARRAYREF_SLOW(sizes))
      .scatter(dim, with_dim(indices), with_dim(grad));
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse2, m) {
  m.impl("value_selecting_reduction_backward", value_selecting_reduction_backward);
}

}  // namespace

void add_index_rules(RuleTable& table) {
  const auto add = [&](Rule rule, std::initializer_list<const char*> names) {
    for (const char* name : names) {
      table[std::string("aten::") + name] = {.rule = rule, .file = __FILE__};
    }
  };
  add(cat, {"cat"});
  add(stack, {"stack"});
  add(with_index, {"gather", "scatter_add", "scatter_add_", "scatter.src", "scatter_.src",
                   "scatter.value", "scatter_.value"});
  add(index_select, {"index_select"});
  add(embedding, {"embedding"});
  add(embedding_backward, {"embedding_dense_backward"});
  add(only_replicated, {"index.Tensor", "index_put", "index_put_", "index_add", "index_add_"});
}

}  // namespace longhaul::dtensor
