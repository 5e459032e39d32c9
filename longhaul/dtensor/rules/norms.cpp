// Normalisation over the last dims, with weights: rows may be cut, what is normalised may not.
#include "longhaul/dtensor/rules/rules.h"

namespace longhaul::dtensor {
namespace {

constexpr const char* kFile = "longhaul/dtensor/rules/norms.cpp";

// x, then weight and bias where given; results y, mean, rstd.
std::vector<Strategy> layer_norm(const OpCall& call, int64_t /*ranks*/) {
  std::vector<Strategy> strategies = {replicated(call)};
  const auto rows = call.input(0).dim() - static_cast<int64_t>(call.args()[1].toListRef().size());
  for (int64_t dim = 0; dim < rows; ++dim) {
    Strategy strategy = uniform(call, Placement::shard(dim));
    for (size_t i = 1; i < call.num_inputs(); ++i) strategy.inputs[i] = Placement::replicate();
    strategies.push_back(strategy);
  }
  return strategies;
}

// dy, x, mean, rstd, weight, bias; results dx, dweight, dbias: each rank's rows give a term of the
// last two.
std::vector<Strategy> layer_norm_backward(const OpCall& call, int64_t /*ranks*/) {
  std::vector<Strategy> strategies = {replicated(call)};
  const auto rows = call.input(0).dim() - static_cast<int64_t>(call.args()[2].toListRef().size());
  for (int64_t dim = 0; dim < rows; ++dim) {
    Strategy strategy = uniform(call, Placement::shard(dim));
    for (size_t i = 4; i < call.num_inputs(); ++i) strategy.inputs[i] = Placement::replicate();
    for (size_t i = 1; i < strategy.outputs.size(); ++i) strategy.outputs[i] = Placement::partial();
    strategies.push_back(strategy);
  }
  return strategies;
}

}  // namespace

void add_norm_rules(RuleTable& table) {
  const char* whole = "what is normalised must be whole, and so must its weights";
  table["aten::native_layer_norm"] = {.rule = layer_norm, .file = kFile, .whole = whole};
  table["aten::native_layer_norm_backward"] = {
      .rule = layer_norm_backward, .file = kFile, .whole = whole};
}

}  // namespace longhaul::dtensor
