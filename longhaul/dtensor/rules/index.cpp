// Joining, gathering, scattering and looking up. The dim that is joined or indexed must be whole: a
// tensor is moved to a cut of another dim. Where it has no other, reading from it is an error (a
// look up in slices is longhaul_model::embedding's), and writing to it gathers.
#include <ATen/ATen.h>
#include <c10/core/WrapDimMinimal.h>
#include <torch/library.h>

#include <algorithm>

#include "longhaul/dtensor/rules/rules.h"

namespace longhaul::dtensor {
namespace {

constexpr const char* kFile = "longhaul/dtensor/rules/index.cpp";

Placement whole() { return Placement::replicate(); }
Placement term() { return Placement::partial(); }
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
std::vector<Strategy> with_index(const OpCall& call) {
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

// Every rank may look up its slice of the index in the whole; terms give terms.
//   self, index
std::vector<Strategy> gather(const OpCall& call, int64_t /*ranks*/) {
  auto strategies = with_index(call);
  const int64_t dim = call.dim_arg(1);
  if (call.input(0).dim() > 0) strategies.push_back({{whole(), cut(dim)}, {cut(dim)}});
  strategies.push_back({{term(), whole()}, {term()}});
  return strategies;
}

//   self, index, src
std::vector<Strategy> scatter(const OpCall& call, int64_t /*ranks*/) {
  auto strategies = with_index(call);
  if (call.num_inputs() == 3) strategies.push_back({{term(), whole(), term()}, {term()}});
  return strategies;
}

// And terms of the sum may come from slices of what is added.
std::vector<Strategy> scatter_add(const OpCall& call, int64_t ranks) {
  auto strategies = scatter(call, ranks);
  const int64_t dim = call.dim_arg(1);
  const Tensor &index = call.input(1), &src = call.input(2);
  if (index.dim() > 0 && src.dim() > 0 && index.size(dim) == src.size(dim)) {
    strategies.push_back({{term(), cut(dim), cut(dim)}, {term()}});
  }
  return strategies;
}

// What terms cannot be put into, nor made of: the largest, a product, one number for all.
std::vector<Strategy> scatter_nonlinear(const OpCall& call, int64_t /*ranks*/) {
  return with_index(call);
}

//   self, index of one dim
std::vector<Strategy> index_select(const OpCall& call, int64_t /*ranks*/) {
  std::vector<Strategy> strategies = {replicated(call)};
  const int64_t dim = call.dim_arg(1);
  strategies.push_back({{whole(), cut(0)}, {cut(dim)}});
  for (int64_t d = 0; d < call.input(0).dim(); ++d) {
    if (d != dim) strategies.push_back({{cut(d), whole()}, {cut(d)}});
  }
  strategies.push_back({{term(), whole()}, {term()}});
  return strategies;
}

//   self, index of one dim, and a source of self's dims, if there is one
std::vector<Strategy> index_write(const OpCall& call, int64_t /*ranks*/) {
  std::vector<Strategy> strategies = {replicated(call)};
  const bool has_source = call.num_inputs() == 3 && call.input(2).dim() == call.input(0).dim();
  for (int64_t d = 0; d < call.input(0).dim(); ++d) {
    if (d == call.dim_arg(1)) continue;
    Strategy strategy = uniform(call, whole());
    strategy.inputs[0] = strategy.outputs[0] = cut(d);
    if (has_source) strategy.inputs[2] = cut(d);
    strategies.push_back(strategy);
  }
  if (has_source) strategies.push_back({{term(), whole(), term()}, {term()}});
  return strategies;
}

std::vector<Strategy> index_add(const OpCall& call, int64_t ranks) {
  auto strategies = index_write(call, ranks);
  const int64_t dim = call.dim_arg(1);
  if (call.input(1).dim() == 1 && call.input(2).dim() > 0) {
    strategies.push_back({{term(), cut(0), cut(dim)}, {term()}});
  }
  return strategies;
}

// How self[indices] lies: `indices` are tensors, broadcast to `broadcast` dims, for some dims of
// self. Their dims stand where the first indexed dim was, or in front where the indexed dims are
// apart.
class Indexed {
 public:
  explicit Indexed(const OpCall& call) : self_dims_(call.input(0).dim()) {
    const auto indices = call.args()[1].toListRef();
    for (size_t dim = 0; dim < indices.size(); ++dim) {
      if (!indices[dim].isTensor() || !indices[dim].toTensor().defined()) continue;
      const Tensor& index = indices[dim].toTensor();
      dims_.push_back(static_cast<int64_t>(dim));
      indices_.push_back(index);
      broadcast_ = std::max(broadcast_, index.dim());
    }
    apart_ = !dims_.empty() && dims_.back() - dims_.front() + 1 != num_indices();
  }

  int64_t num_indices() const { return static_cast<int64_t>(dims_.size()); }
  int64_t self_dims() const { return self_dims_; }
  int64_t broadcast() const { return broadcast_; }
  int64_t result_dims() const { return self_dims_ - num_indices() + broadcast_; }
  bool is_indexed(int64_t dim) const {
    return std::find(dims_.begin(), dims_.end(), dim) != dims_.end();
  }
  // The result's dim that the index tensors' dim 0 is, and the one that a dim of self is that is
  // not indexed.
  int64_t first() const { return apart_ || dims_.empty() ? 0 : dims_.front(); }
  int64_t result_dim_of(int64_t dim) const {
    const auto before = std::count_if(dims_.begin(), dims_.end(), [&](auto d) { return d < dim; });
    return dim - before + (apart_ || before > 0 ? broadcast_ : 0);
  }
  // Where index tensor `i` lies if dim `b` of the broadcast ones is cut.
  Placement of_index(size_t i, int64_t b) const {
    const int64_t own = b - (broadcast_ - indices_[i].dim());
    return own < 0 || indices_[i].size(own) == 1 ? whole() : cut(own);
  }

 private:
  int64_t self_dims_, broadcast_ = 0;
  std::vector<int64_t> dims_;
  std::vector<Tensor> indices_;
  bool apart_ = false;
};

//   self, index tensors
std::vector<Strategy> index(const OpCall& call, int64_t /*ranks*/) {
  const Indexed indexed(call);
  std::vector<Strategy> strategies = {replicated(call)};
  for (int64_t dim = 0; dim < indexed.self_dims(); ++dim) {
    if (indexed.is_indexed(dim)) continue;
    Strategy strategy = uniform(call, whole());
    strategy.inputs[0] = cut(dim);
    strategy.outputs[0] = cut(indexed.result_dim_of(dim));
    strategies.push_back(strategy);
  }
  for (int64_t b = 0; b < indexed.broadcast(); ++b) {
    Strategy strategy = uniform(call, whole());
    for (size_t i = 1; i < call.num_inputs(); ++i) {
      strategy.inputs[i] = indexed.of_index(i - 1, b);
    }
    strategy.outputs[0] = cut(indexed.first() + b);
    strategies.push_back(strategy);
  }
  Strategy terms = uniform(call, whole());
  terms.inputs[0] = terms.outputs[0] = term();
  strategies.push_back(terms);
  return strategies;
}

// Where `values`, broadcast to self[indices], lie if dim `dim` of that is cut.
Placement of_values(const Tensor& values, const Indexed& indexed, int64_t dim) {
  const int64_t own = dim - (indexed.result_dims() - values.dim());
  return own < 0 || values.size(own) == 1 ? whole() : cut(own);
}

// One number for the elements that a mask chooses, which goes along with self.
std::vector<Strategy> mask_put(const OpCall& call) {
  std::vector<Strategy> strategies = {replicated(call)};
  const bool first = call.input_of(1) == 1 && call.args()[1].toListRef()[0].isTensor();
  if (call.num_inputs() != 3 || !first || call.input(2).numel() != 1) return strategies;
  for (int64_t dim = 0; dim < call.input(0).dim(); ++dim) {
    const Placement mask = dim < call.input(1).dim() ? cut(dim) : whole();
    strategies.push_back({{cut(dim), mask, whole()}, {cut(dim)}});
  }
  return strategies;
}

bool is_mask(const Tensor& index) {
  return index.scalar_type() == at::kBool || index.scalar_type() == at::kByte;
}

//   self, index tensors, values
std::vector<Strategy> index_put(const OpCall& call, int64_t /*ranks*/) {
  for (size_t i = 1; i + 1 < call.num_inputs(); ++i) {
    if (is_mask(call.input(i))) return mask_put(call);
  }
  const Indexed indexed(call);
  const size_t last = call.num_inputs() - 1;
  const Tensor& values = call.input(last);
  std::vector<Strategy> strategies = {replicated(call)};
  for (int64_t dim = 0; dim < indexed.self_dims(); ++dim) {
    if (indexed.is_indexed(dim)) continue;
    Strategy strategy = uniform(call, whole());
    strategy.inputs[0] = strategy.outputs[0] = cut(dim);
    strategy.inputs[last] = of_values(values, indexed, indexed.result_dim_of(dim));
    strategies.push_back(strategy);
  }
  Strategy terms = uniform(call, whole());
  terms.inputs[0] = terms.inputs[last] = terms.outputs[0] = term();
  strategies.push_back(terms);
  const bool adds = call.bool_arg(3);
  for (int64_t b = 0; adds && b < indexed.broadcast(); ++b) {
    if (of_values(values, indexed, indexed.first() + b).is_replicate()) continue;
    Strategy strategy = uniform(call, term());
    for (size_t i = 1; i < last; ++i) strategy.inputs[i] = indexed.of_index(i - 1, b);
    strategy.inputs[last] = of_values(values, indexed, indexed.first() + b);
    strategies.push_back(strategy);
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

// In place: what the operator without the underscore gives, put back where self lies. Self may be
// cut where no way to write in place exists, as the zeros are that autograd adds gradients to.
void in_place(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  std::string name = op.schema().name();
  size_t num_args = op.schema().arguments().size();
  if (name == "aten::_index_put_impl_") {  // index_put_, and whether indices may be unchecked
    name = "aten::index_put_";
    torch::jit::drop(stack, 1);
    --num_args;
  }
  name.pop_back();
  const auto functional = c10::Dispatcher::singleton().findSchemaOrThrow(
      name.c_str(), op.schema().overload_name().c_str());
  const Tensor self = torch::jit::peek(stack, 0, num_args).toTensor();
  functional.callBoxed(stack);
  const Tensor result = torch::jit::pop(stack).toTensor();
  stack.emplace_back(self.copy_(result));
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
  const auto add = [&](Rule rule, std::initializer_list<const char*> names,
                       const char* whole = nullptr) {
    for (const char* name : names) {
      table[std::string("aten::") + name] = {.rule = rule, .file = kFile, .whole = whole};
    }
  };
  const char* joined = "the dim that is joined must be whole";
  const char* written = "what is written to a dim, by positions in the whole of it, must be whole";
  add(cat, {"cat"}, joined);
  add(stack, {"stack"}, joined);
  add(gather, {"gather"});
  add(scatter, {"scatter.src"}, written);
  add(scatter_add, {"scatter_add"}, written);
  add(scatter_nonlinear, {"scatter.value", "scatter_reduce.two"}, written);
  add(index_select, {"index_select"});
  add(index_add, {"index_add"}, written);
  add(index_write, {"index_copy"}, written);
  add(index_write, {"index_fill.int_Scalar"}, written);
  add(index, {"index.Tensor"});
  table["aten::index_put"] = {// its Meta kernel knows no masks
                              .rule = index_put,
                              .layout = Layout::kAsFirst,
                              .file = kFile,
                              .whole = written};
  for (const char* name :
       {"scatter_.src", "scatter_.value", "scatter_add_", "scatter_reduce_.two", "index_add_",
        "index_copy_", "index_fill_.int_Scalar", "index_put_", "_index_put_impl_"}) {
    table[std::string("aten::") + name] = {.handler = in_place, .file = kFile};
  }
  add(embedding, {"embedding"});
  add(embedding_backward, {"embedding_dense_backward"});
}

}  // namespace longhaul::dtensor
