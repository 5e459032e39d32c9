// Operators that compute each element from the elements at its place, with broadcasting.
#include "longhaul/dtensor/rules/rules.h"

namespace longhaul::dtensor {
namespace {

constexpr const char* kFile = "longhaul/dtensor/rules/pointwise.cpp";
constexpr const char* kBroadcast = "a dim of one that is broadcast must be whole";

// The same slice of every input that has the dim, all of those that are broadcast along it.
Strategy sharded(const OpCall& call, int64_t dim) {
  const auto out_dims = static_cast<int64_t>(call.output_sizes[0].size());
  Strategy strategy = uniform(call, Placement::shard(dim));
  for (size_t i = 0; i < call.num_inputs(); ++i) {
    const Tensor& x = call.input(i);
    const int64_t own = dim - (out_dims - x.dim());
    const bool broadcast =
        own < 0 || (x.size(own) == 1 && call.output_sizes[0][static_cast<size_t>(dim)] != 1);
    strategy.inputs[i] = broadcast ? Placement::replicate() : Placement::shard(own);
  }
  return strategy;
}

std::vector<Strategy> pointwise(const OpCall& call, int64_t /*ranks*/) {
  std::vector<Strategy> strategies = {replicated(call)};
  const auto dims = static_cast<int64_t>(call.output_sizes[0].size());
  for (int64_t dim = 0; dim < dims; ++dim) strategies.push_back(sharded(call, dim));
  return strategies;
}

// f(a + b) = f(a) + f(b) in the first input; others are factors that every rank has.
std::vector<Strategy> linear_in_first(const OpCall& call, int64_t ranks) {
  auto strategies = pointwise(call, ranks);
  for (const Reduction reduction : {Reduction::kSum, Reduction::kAvg}) {
    Strategy strategy = uniform(call, Placement::partial(reduction));
    for (size_t i = 1; i < call.num_inputs(); ++i) strategy.inputs[i] = Placement::replicate();
    strategies.push_back(strategy);
  }
  return strategies;
}

std::vector<Strategy> product(const OpCall& call, int64_t ranks) {
  auto strategies = linear_in_first(call, ranks);
  for (const Reduction reduction : {Reduction::kSum, Reduction::kAvg}) {
    Strategy strategy = uniform(call, Placement::partial(reduction));
    strategy.inputs[0] = Placement::replicate();
    if (call.num_inputs() > 1) strategies.push_back(strategy);
  }
  return strategies;
}

std::vector<Strategy> sum_of_two(const OpCall& call, int64_t ranks) {
  auto strategies = pointwise(call, ranks);
  bool numbers = false;  // a plain number is no term
  for (size_t i = 0; i < call.num_inputs(); ++i) numbers |= call.input(i).dim() == 0;
  if (call.num_inputs() == 2) {
    strategies.push_back(uniform(call, Placement::partial(Reduction::kSum)));
    if (!numbers) strategies.push_back(uniform(call, Placement::partial(Reduction::kAvg)));
  }
  return strategies;
}

// Any placement stays: nothing is computed.
std::vector<Strategy> same(const OpCall& call, int64_t ranks) {
  auto strategies = pointwise(call, ranks);
  for (const auto reduction :
       {Reduction::kSum, Reduction::kAvg, Reduction::kMax, Reduction::kMin}) {
    strategies.push_back(uniform(call, Placement::partial(reduction)));
  }
  return strategies;
}

// To a dtype that holds all values of the old one terms may go one by one; to another one their sum
// must be rounded, not they.
std::vector<Strategy> to_copy(const OpCall& call, int64_t ranks) {
  const auto& wanted = call.args()[1];
  const bool narrows =
      !wanted.isNone() && c10::promoteTypes(call.input(0).scalar_type(), wanted.toScalarType()) !=
                              wanted.toScalarType();
  return narrows ? pointwise(call, ranks) : same(call, ranks);
}

}  // namespace

void add_pointwise_rules(RuleTable& table) {
  const auto add = [&](Rule rule, std::initializer_list<const char*> names) {
    for (const char* name : names) {
      table[std::string("aten::") + name] = {.rule = rule, .file = kFile, .whole = kBroadcast};
    }
  };
  add(same, {"clone", "detach", "alias", "copy_", "contiguous", "zero_", "lift_fresh"});
  add(to_copy, {"_to_copy"});
  add(linear_in_first, {"neg", "neg_", "div.Tensor", "div.Scalar", "div_.Tensor", "div_.Scalar"});
  add(product, {"mul.Tensor", "mul.Scalar", "mul_.Tensor", "mul_.Scalar"});
  add(sum_of_two, {"add.Tensor", "sub.Tensor", "add_.Tensor", "sub_.Tensor"});
  add(pointwise, {"add.Scalar",
                  "sub.Scalar",
                  "add_.Scalar",
                  "sub_.Scalar",
                  "rsub.Scalar",
                  "rsub.Tensor",
                  "exp",
                  "exp_",
                  "log",
                  "log_",
                  "log1p",
                  "expm1",
                  "sqrt",
                  "sqrt_",
                  "rsqrt",
                  "reciprocal",
                  "reciprocal_",
                  "sin",
                  "cos",
                  "tanh",
                  "sigmoid",
                  "sigmoid_",
                  "silu",
                  "silu_",
                  "silu_backward",
                  "sigmoid_backward",
                  "tanh_backward",
                  "relu",
                  "relu_",
                  "threshold_backward",
                  "softplus",
                  "abs",
                  "abs_",
                  "sign",
                  "sgn",
                  "floor",
                  "ceil",
                  "round",
                  "square",
                  "pow.Tensor_Scalar",
                  "pow.Tensor_Tensor",
                  "pow.Scalar",
                  "clamp",
                  "clamp_",
                  "clamp_min",
                  "clamp_min_",
                  "clamp_max",
                  "clamp.Tensor",
                  "maximum",
                  "minimum",
                  "remainder.Scalar",
                  "remainder.Tensor",
                  "remainder_.Scalar",
                  "fmod.Scalar",
                  "floor_divide",
                  "div.Tensor_mode",
                  "div.Scalar_mode",
                  "eq.Tensor",
                  "eq.Scalar",
                  "ne.Tensor",
                  "ne.Scalar",
                  "lt.Tensor",
                  "lt.Scalar",
                  "le.Tensor",
                  "le.Scalar",
                  "gt.Tensor",
                  "gt.Scalar",
                  "ge.Tensor",
                  "ge.Scalar",
                  "logical_and_",
                  "logical_not_",
                  "bitwise_not",
                  "bitwise_and.Tensor",
                  "bitwise_or.Tensor",
                  "masked_fill.Scalar",
                  "masked_fill.Tensor",
                  "masked_fill_.Scalar",
                  "masked_fill_.Tensor",
                  "isfinite",
                  "addcmul",
                  "addcmul_",
                  "addcdiv",
                  "addcdiv_",
                  "lerp.Scalar",
                  "lerp_.Scalar",
                  "fill_.Scalar",
                  "fill_.Tensor",
                  "erf",
                  "gelu",
                  "gelu_backward",
                  "xlogy.Tensor"});
  for (const char* name : {"where.self", "logical_not", "logical_and", "logical_or", "logical_xor",
                           "isinf", "isnan", "nan_to_num", "polar"}) {
    table[std::string("aten::") + name] = {
        .rule = pointwise, .layout = Layout::kAsSum, .file = kFile, .whole = kBroadcast};
  }
}

}  // namespace longhaul::dtensor
