// New tensors after the image of another, whose values are not read.
#include <ATen/ATen.h>

#include "longhaul/base/error.h"
#include "longhaul/dtensor/dtensor.h"
#include "longhaul/dtensor/rules/rules.h"

namespace longhaul::dtensor {
namespace {

constexpr const char* kFile = "longhaul/dtensor/rules/factory.cpp";

// Wherever the image lies. Terms would make a number of ranks out of a one: replicated then.
std::vector<Strategy> like(const OpCall& call, int64_t /*ranks*/) {
  std::vector<Strategy> strategies = {replicated(call)};
  for (int64_t dim = 0; dim < call.input(0).dim(); ++dim) {
    strategies.push_back(uniform(call, Placement::shard(dim)));
  }
  for (const auto reduction :
       {Reduction::kSum, Reduction::kAvg, Reduction::kMax, Reduction::kMin}) {
    strategies.push_back({{Placement::partial(reduction)}, {Placement::replicate()}});
  }
  return strategies;
}

// Of other sizes: replicated, unless the sizes are the image's.
std::vector<Strategy> of_size(const OpCall& call, int64_t ranks) {
  auto strategies = like(call, ranks);
  if (call.input(0).sizes() == at::IntArrayRef(call.output_sizes[0])) return strategies;
  for (auto& strategy : strategies) strategy.outputs[0] = Placement::replicate();
  return strategies;
}

// What autograd lays a gradient down in: like self, terms included, in the order of the strides.
//   new_empty_strided(self, sizes, strides, ...)
void new_empty_strided(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const size_t num_args = op.schema().arguments().size();
  const Tensor self = torch::jit::peek(stack, 0, num_args).toTensor();
  const auto sizes = torch::jit::peek(stack, 1, num_args).toIntVector();
  const auto strides = torch::jit::peek(stack, 2, num_args).toIntVector();
  LONGHAUL_CHECK(self.sizes() == at::IntArrayRef(sizes),
                 "new_empty_strided: sizes [{}] for a DTensor of [{}]", fmt::join(sizes, ", "),
                 fmt::join(self.sizes(), ", "));
  const Tensor& local = local_of(self);
  const Tensor order = at::empty_strided(sizes, strides, local.options().device(at::kMeta));
  Tensor part =
      at::empty_strided(local.sizes(), dense_strides(local.sizes(), order), local.options());
  const Tensor result = wrap(part, spec_of(self), sizes, dense_strides(sizes, order));
  torch::jit::drop(stack, num_args);
  stack.emplace_back(result);
}

}  // namespace

void add_factory_rules(RuleTable& table) {
  for (const char* name : {"zeros_like", "ones_like", "empty_like", "full_like"}) {
    table[std::string("aten::") + name] = {.rule = like, .file = kFile};
  }
  table["aten::new_empty_strided"] = {.handler = new_empty_strided, .file = kFile};
  for (const char* name : {"new_zeros", "new_ones", "new_empty", "new_full"}) {
    table[std::string("aten::") + name] = {.rule = of_size, .size_arg = 1, .file = kFile};
  }
}

}  // namespace longhaul::dtensor
