// New tensors after the image of another, whose values are not read.
#include "longhaul/dtensor/rules/rules.h"

namespace longhaul::dtensor {
namespace {

// Wherever the image lies. Terms would make a number of ranks out of a one: replicated then.
std::vector<Strategy> like(const OpCall& call, int64_t /*ranks*/) {
  std::vector<Strategy> strategies = {replicated(call)};
  for (int64_t dim = 0; dim < call.input(0).dim(); ++dim) {
    strategies.push_back(uniform(call, Placement::shard(dim)));
  }
  for (const auto reduction : {Reduction::kSum, Reduction::kAvg, Reduction::kMax, Reduction::kMin}) {
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

}  // namespace

void add_factory_rules(RuleTable& table) {
  for (const char* name : {"zeros_like", "ones_like", "empty_like", "full_like"}) {
    table[std::string("aten::") + name] = {.rule = like, .file = __FILE__};
  }
  for (const char* name : {"new_zeros", "new_ones", "new_empty", "new_full"}) {
    table[std::string("aten::") + name] = {.rule = of_size, .size_arg = 1, .file = __FILE__};
  }
}

}  // namespace longhaul::dtensor
