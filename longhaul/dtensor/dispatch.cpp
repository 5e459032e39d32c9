// How ATen's operators reach DTensors: one boxed function stands for all of them on the DTensors'
// dispatch key. It asks the operator's rule for placements, moves the inputs there, calls the
// operator on the parts and makes DTensors of the results. Decisions are cached.
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>

#include "longhaul/base/error.h"
#include "longhaul/base/log.h"
#include "longhaul/dtensor/dispatch_cache.h"
#include "longhaul/dtensor/dtensor.h"
#include "longhaul/dtensor/dtensor_impl.h"
#include "longhaul/dtensor/op_call.h"
#include "longhaul/dtensor/redistribute.h"

namespace longhaul::dtensor {

DispatchCache::DispatchCache() = default;

namespace {

using c10::IValue;
using torch::jit::Stack;
using Key = DispatchCache::Key;

// --- deciding ----------------------------------------------------------------------------------

Tensor on_meta(const Tensor& x) {
  return at::empty_strided(x.sizes(), x.strides(), x.options().device(at::kMeta));
}

template <typename F>
IValue map_tensors(const IValue& value, const F& f) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(f(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& x : value.toTensorList()) list.push_back(x.defined() ? f(x) : x);
    return list;
  }
  if (value.isList()) {
    const auto elements = value.toListRef();
    bool has_tensors = false;
    for (const auto& element : elements) has_tensors |= element.isTensor();
    if (!has_tensors) return value;
    c10::List<std::optional<Tensor>> list;
    for (const auto& element : elements) {
      list.push_back(element.isTensor() && element.toTensor().defined()
                         ? std::optional<Tensor>(f(element.toTensor()))
                         : std::nullopt);
    }
    return list;
  }
  return value;
}

// Sizes and strides of the results' wholes, by the operator on the Meta device.
std::vector<Decision::Output> infer_outputs(const c10::OperatorHandle& op,
                                            c10::ArrayRef<IValue> args) {
  Stack stack;
  for (const IValue& arg : args) {
    stack.push_back(arg.isDevice() ? IValue(at::Device(at::kMeta)) : map_tensors(arg, on_meta));
  }
  op.callBoxed(stack);
  std::vector<Decision::Output> outputs;
  const auto add = [&](const Tensor& x) {
    outputs.push_back(x.defined() ? Decision::Output{{}, x.sizes().vec(), x.strides().vec()}
                                  : Decision::Output{});
  };
  for (const IValue& result : stack) {
    if (result.isTensor()) {
      add(result.toTensor());
    } else {
      LONGHAUL_CHECK(result.isTensorList(), "{} returns something else than tensors",
                     op.schema().name());
      for (const Tensor& x : result.toTensorList()) add(x);
    }
  }
  return outputs;
}

const RuleEntry& rule_of(const OpCall& call) {
  const RuleEntry* entry = find_rule(call.full_name());
  LONGHAUL_CHECK(entry != nullptr,
                 "no sharding rule for {} on {}; add one to {}, or compute on parts with "
                 "local_map()",
                 call.full_name(), describe(call.inputs()), rule_file_of(call.op()));
  return *entry;
}

// The argument that result `i` is, written in place; -1 if the result is new.
int written_arg(const c10::FunctionSchema& schema, size_t i) {
  if (i >= schema.returns().size()) return -1;
  const auto* alias = schema.returns()[i].alias_info();
  if (alias == nullptr || !alias->isWrite()) return -1;
  for (size_t arg = 0; arg < schema.arguments().size(); ++arg) {
    const auto* own = schema.arguments()[arg].alias_info();
    if (own != nullptr && own->isWrite() && own->beforeSets() == alias->beforeSets()) {
      return static_cast<int>(arg);
    }
  }
  return -1;
}

bool is_written(const c10::FunctionSchema& schema, const OpCall& call, size_t input) {
  for (size_t arg = 0; arg < schema.arguments().size(); ++arg) {
    const auto* alias = schema.arguments()[arg].alias_info();
    if (alias != nullptr && alias->isWrite() && call.input_of(arg) == static_cast<int>(input)) {
      return true;
    }
  }
  return false;
}

// Whether each result that is an argument, written in place, lies as that argument does.
bool keeps_written(const c10::FunctionSchema& schema, const OpCall& call,
                   const Strategy& strategy) {
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    const int arg = written_arg(schema, i);
    if (arg < 0) continue;
    const auto input = static_cast<size_t>(call.input_of(static_cast<size_t>(arg)));
    const auto& output = strategy.outputs[std::min(i, strategy.outputs.size() - 1)];
    if (output != strategy.inputs[input]) return false;
  }
  return true;
}

// What of a tensor lies along axis `axis`: all that the other axes do not cut away.
int64_t bytes_along(const Tensor& x, size_t axis) {
  int64_t bytes = x.numel() * static_cast<int64_t>(x.element_size());
  const Spec& spec = spec_of(x);
  for (size_t i = 0; i < spec.placements.size(); ++i) {
    if (i != axis && spec.placements[i].is_shard()) {
      bytes = ceil_div(bytes, spec.mesh->axis(static_cast<int>(i)).size());
    }
  }
  return bytes;
}

// In microseconds of communication.
double cost_of(const c10::FunctionSchema& schema, const OpCall& call, const Strategy& strategy,
               size_t axis, const Communicator& group) {
  double cost = 0;
  for (size_t i = 0; i < call.num_inputs(); ++i) {
    const Tensor& x = call.input(i);
    // A number that every rank has.
    const bool plain = !is_dtensor(x);
    const Placement now = plain ? Placement::replicate() : spec_of(x).placements[axis];
    const Placement& wanted = strategy.inputs[i];
    if (now == wanted) continue;
    if (plain || is_written(schema, call, i)) return std::numeric_limits<double>::infinity();
    cost += redistribute_cost(bytes_along(x, axis), group.size(), group.link(), now, wanted);
  }
  return cost;
}

// A cut input that every possible strategy wants whole: said, with the rule's reason, or an error
// where the rule gives none. A gather that was chosen as the cheaper way is not said.
void tell_of_gathers(const OpCall& call, const RuleEntry& entry, const Communicator& group,
                     size_t axis, const std::vector<const Strategy*>& possible) {
  for (size_t i = 0; i < call.num_inputs(); ++i) {
    const Tensor& x = call.input(i);
    if (!is_dtensor(x) || !spec_of(x).placements[axis].is_shard()) continue;
    const bool avoidable = std::any_of(possible.begin(), possible.end(), [&](const auto* strategy) {
      return !strategy->inputs[i].is_replicate();
    });
    if (avoidable) continue;
    LONGHAUL_CHECK(entry.whole != nullptr,
                   "{} on {} has no way but to gather input {} along axis {}, and its rule ({}) "
                   "does not do so unasked; redistribute() it first",
                   call.full_name(), describe(call.inputs()), i, group.axis(), entry.file);
    log::info("{} on {}: input {} is gathered along axis {}: {} ({})", call.full_name(),
              describe(call.inputs()), i, group.axis(), entry.whole, entry.file);
  }
}

Strategy cheapest(const c10::OperatorHandle& op, const OpCall& call, const RuleEntry& entry,
                  const DeviceMesh& mesh, size_t axis) {
  const Communicator& group = mesh.axis(static_cast<int>(axis));
  const auto strategies = entry.rule(call, mesh.size());
  constexpr double kImpossible = std::numeric_limits<double>::infinity();
  std::vector<const Strategy*> possible;
  const Strategy* best = nullptr;
  double least = kImpossible;
  for (const auto& strategy : strategies) {
    if (!keeps_written(op.schema(), call, strategy)) continue;
    const double cost = cost_of(op.schema(), call, strategy, axis, group);
    if (cost < kImpossible) possible.push_back(&strategy);
    if (cost < least) {
      least = cost;
      best = &strategy;
    }
  }
  LONGHAUL_CHECK(best != nullptr,
                 "{} has no way to compute on {} along axis {} of mesh {} (rule in {})",
                 call.full_name(), describe(call.inputs()), group.axis(), mesh.text(), entry.file);
  if (group.size() > 1) tell_of_gathers(call, entry, group, axis, possible);
  return *best;
}

std::vector<Decision::Output> lay_out(const c10::OperatorHandle& op, const RuleEntry& entry,
                                      const OpCall& call) {
  if (entry.layout == Layout::kNumber) return {Decision::Output{}};
  if (entry.layout == Layout::kAsFirst) {
    const Tensor like = at::empty_like(on_meta(call.input(0)));
    return {{{}, like.sizes().vec(), like.strides().vec()}};
  }
  if (entry.layout == Layout::kAsSum) {
    Tensor sum = on_meta(call.input(0)) + 0;
    for (size_t i = 1; i < call.num_inputs(); ++i) sum = sum + on_meta(call.input(i));
    return {{{}, sum.sizes().vec(), sum.strides().vec()}};
  }
  try {
    return infer_outputs(op, call.args());
  } catch (const c10::Error& error) {
    throw Error(fmt::format("{} on {}: {}", call.full_name(), describe(call.inputs()),
                            error.what_without_backtrace()));
  }
}

Decision decide(const c10::OperatorHandle& op, const RuleEntry& entry, OpCall& call,
                const DeviceMesh& mesh) {
  Decision decision;
  decision.outputs = lay_out(op, entry, call);
  for (const auto& output : decision.outputs) call.output_sizes.push_back(output.sizes);
  for (size_t i = 0; i < op.schema().returns().size(); ++i) {
    decision.written.push_back(written_arg(op.schema(), i));
  }
  decision.inputs.resize(call.num_inputs());
  for (size_t axis = 0; axis < static_cast<size_t>(mesh.num_axes()); ++axis) {
    const Strategy strategy = cheapest(op, call, entry, mesh, axis);
    for (size_t i = 0; i < call.num_inputs(); ++i) {
      decision.inputs[i].push_back(strategy.inputs[i]);
    }
    for (size_t i = 0; i < decision.outputs.size(); ++i) {
      // Lists of results are as long as it takes; their placement is the first one's.
      decision.outputs[i].placements.push_back(
          strategy.outputs[std::min(i, strategy.outputs.size() - 1)]);
    }
  }
  for (size_t i = 0; i < call.num_inputs(); ++i) {
    if (is_dtensor(call.input(i))) {
      decision.redistributes |= decision.inputs[i] != spec_of(call.input(i)).placements;
    }
  }
  if (entry.size_arg >= 0) {
    decision.local_sizes =
        mesh.local_sizes(decision.outputs[0].sizes, decision.outputs[0].placements);
  }
  return decision;
}

// --- executing ---------------------------------------------------------------------------------

const Mesh& mesh_of(const c10::OperatorHandle& op, c10::ArrayRef<IValue> args) {
  const Mesh* mesh = nullptr;
  const auto look = [&](const Tensor& x) {
    if (!is_dtensor(x)) {
      LONGHAUL_CHECK(!x.defined() || x.dim() == 0,
                     "{}: a plain tensor [{}] beside a DTensor; make it one with distribute() or "
                     "from_local()",
                     op.schema().name(), fmt::join(x.sizes(), ", "));
      return;
    }
    const Mesh& own = spec_of(x).mesh;
    LONGHAUL_CHECK(mesh == nullptr || *mesh == own || **mesh == *own,
                   "{}: DTensors on two meshes, {} and {}", op.schema().name(), (*mesh)->text(),
                   own->text());
    mesh = &own;
  };
  for (const IValue& arg : args) {
    if (arg.isTensor()) {
      look(arg.toTensor());
    } else if (arg.isList()) {
      for (const IValue& element : arg.toListRef()) {
        if (element.isTensor()) look(element.toTensor());
      }
    }
  }
  LONGHAUL_CHECK(mesh != nullptr, "{} without a DTensor", op.schema().name());
  return *mesh;
}

void execute(const c10::OperatorHandle& op, Stack& stack, const Mesh& mesh, const RuleEntry& entry,
             const Decision& decision) {
  const auto& schema = op.schema();
  const size_t num_args = schema.arguments().size();
  const size_t first = stack.size() - num_args;
  std::vector<IValue> written;  // what results that are arguments go back to
  for (const int arg : decision.written) {
    written.push_back(arg < 0 ? IValue() : stack[first + static_cast<size_t>(arg)]);
  }
  size_t input = 0;
  const auto local = [&](const Tensor& x) {
    const Placements& wanted = decision.inputs[input++];
    if (!is_dtensor(x)) return x;
    if (!decision.redistributes) return local_of(x);
    const Tensor part =
        redistribute_local(local_of(x), x.sizes(), *mesh, spec_of(x).placements, wanted);
    // In the order of the whole's dims, or the result would be laid out otherwise than it says.
    const auto strides = dense_strides(part.sizes(), x);
    if (part.strides() == at::IntArrayRef(strides)) return part;
    return at::empty_strided(part.sizes(), strides, part.options()).copy_(part);
  };
  for (size_t i = first; i < stack.size(); ++i) {
    if (stack[i].isTensor()) {
      if (stack[i].toTensor().defined()) stack[i] = local(stack[i].toTensor());
    } else if (stack[i].isList()) {
      stack[i] = map_tensors(stack[i], local);
    }
  }
  if (entry.size_arg >= 0) {
    stack[first + static_cast<size_t>(entry.size_arg)] = decision.local_sizes;
  }
  op.callBoxed(stack);

  size_t output = 0;
  const auto whole = [&](const Tensor& x) {
    const auto& spec = decision.outputs[output++];
    return x.defined() ? wrap(x, {mesh, spec.placements}, spec.sizes, spec.strides) : x;
  };
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    IValue& result = stack[first + i];
    if (!written[i].isNone()) {
      result = std::move(written[i]);
      ++output;
    } else if (result.isTensor()) {
      result = whole(result.toTensor());
    } else {
      c10::List<Tensor> list;
      for (const Tensor& x : result.toTensorList()) list.push_back(whole(x));
      result = std::move(list);
    }
  }
}

// An operator that autograd would have taken apart, called below it.
bool is_made_of_others(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
}

void dispatch(const c10::OperatorHandle& op, Stack* stack) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const auto args = torch::jit::last(*stack, op.schema().arguments().size());
  const Mesh mesh = mesh_of(op, args);
  Key key;
  key.push_back(reinterpret_cast<int64_t>(&op.schema()));
  bool cacheable = true;
  for (const IValue& arg : args) cacheable = cacheable && DispatchCache::add(key, arg);
  const uint64_t hash = DispatchCache::hash_of(key);
  if (cacheable) {
    if (const Decision* known = mesh->cache().find(key, hash)) {
      execute(op, *stack, mesh, *known->entry, *known);
      return;
    }
  }
  OpCall call(op, args);
  if (is_made_of_others(op) && find_rule(call.full_name()) == nullptr) {
    op.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, *stack);
    return;
  }
  const RuleEntry& entry = rule_of(call);
  if (entry.handler != nullptr) {
    entry.handler(op, *stack);
    return;
  }
  Decision decision = decide(op, entry, call, *mesh);
  decision.entry = &entry;
  if (!cacheable) {
    execute(op, *stack, mesh, entry, decision);
    return;
  }
  execute(op, *stack, mesh, entry, mesh->cache().insert(key, hash, std::move(decision)));
}

TORCH_LIBRARY_IMPL(_, Fake, m) {  // kDTensorKey
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&dispatch>());
}

// Differentiated by ops/matmul itself.
TORCH_LIBRARY_IMPL(longhaul_model, AutogradPrivateUse2, m) {
  m.impl("linear", torch::CppFunction::makeFromBoxedFunction<&dispatch>());
  m.impl("linear_grad", torch::CppFunction::makeFromBoxedFunction<&dispatch>());
}

}  // namespace
}  // namespace longhaul::dtensor
