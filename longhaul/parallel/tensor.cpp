#include "longhaul/parallel/tensor.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "longhaul/base/error.h"

namespace longhaul::parallel {
namespace {

using dtensor::Mesh;
using dtensor::Placements;

bool ends_in(const std::string& name, const std::string& end) {
  if (name.size() < end.size() || !name.ends_with(end)) return false;
  return name.size() == end.size() || name[name.size() - end.size() - 1] == '.';
}

// The longest entry that fits; null: none.
const PlanEntry* entry_for(const std::string& module, const TensorPlan& plan) {
  const PlanEntry* found = nullptr;
  for (const auto& entry : plan) {
    if (!ends_in(module, entry.module)) continue;
    if (found == nullptr || entry.module.size() > found->module.size()) found = &entry;
  }
  return found;
}

std::string module_of(const std::string& parameter, const std::vector<nn::NamedModule>& modules) {
  // Own names of parameters may hold dots ("experts" has "gate_proj.weight").
  std::string best;
  for (const auto& [name, module] : modules) {
    if (parameter.rfind(name + ".", 0) == 0 && name.size() > best.size()) best = name;
  }
  return best;
}

// A mistyped entry would change nothing, and nobody would be told.
void check_named(const TensorPlan& plan, const std::vector<nn::NamedModule>& modules) {
  for (const auto& entry : plan) {
    const bool named = std::any_of(modules.begin(), modules.end(), [&](const auto& module) {
      return ends_in(module.name, entry.module);
    });
    LONGHAUL_CHECK(named,
                   "tensor parallel plan: no module's name ends in \"{}\"; correct the entry, or "
                   "leave it out for a model without that part",
                   entry.module);
  }
}

// Whether the module, or one around it, gets this rank's part of the inputs.
bool has_own_tokens(const std::string& module, const TensorPlan& plan,
                    const std::vector<nn::NamedModule>& modules) {
  return std::any_of(modules.begin(), modules.end(), [&](const auto& around) {
    if (module != around.name && !module.starts_with(around.name + ".")) return false;
    const auto* entry = entry_for(around.name, plan);
    return entry != nullptr && entry->style.local && entry->style.input &&
           entry->style.input->is_shard();
  });
}

void make_dtensor(Tensor& slot, const Mesh& mesh, const Placement& placement) {
  const bool trains = slot.requires_grad();
  slot = dtensor::distribute(slot.detach(), mesh, {placement}).set_requires_grad(trains);
}

}  // namespace

ParallelStyle colwise_parallel(std::optional<Placement> input) {
  return {.parameters = Placement::shard(0), .input = input};
}
ParallelStyle rowwise_parallel(std::optional<Placement> output) {
  return {.parameters = Placement::shard(1), .output = output};
}
ParallelStyle rowwise_parallel_embedding(std::optional<Placement> output) {
  return {.parameters = Placement::shard(0), .output = output};
}
ParallelStyle sequence_parallel() { return {}; }
ParallelStyle no_parallel() { return {.plain_parameters = true}; }
ParallelStyle prepare_module_input(Placement input) { return {.input = input}; }
ParallelStyle prepare_module_output(Placement output) { return {.output = output}; }
ParallelStyle prepare_module_input_output(Placement input, Placement output) {
  return {.input = input, .output = output, .local = true};
}

// What stands at a module's edges.
class TensorParallel::Edge : public nn::ModuleHook {
 public:
  Edge(nn::Module& module, ParallelStyle style, Mesh mesh)
      : module_(&module), style_(style), mesh_(std::move(mesh)) {
    module_->add_hook(this);
  }
  ~Edge() override { module_->remove_hook(this); }

  std::vector<Tensor> before(std::vector<Tensor> inputs) override {
    if (!style_.input) return inputs;
    if (style_.local) {
      for (auto& input : inputs) input = part_of(input);
    } else {
      inputs[0] = placed(inputs[0], *style_.input);
    }
    return inputs;
  }

  Tensor after(Tensor output) override {
    if (!style_.output) return output;
    if (!style_.local) return placed(output, *style_.output);
    const std::vector<int64_t> sizes = whole_sizes(output);
    return dtensor::from_local(output, mesh_, {*style_.output}, sizes);
  }

 private:
  Tensor placed(const Tensor& x, const Placement& placement) const {
    const Tensor whole = dtensor::is_dtensor(x) ? x : dtensor::from_local(x, mesh_, {kWhole});
    return dtensor::redistribute(whole, {placement});
  }

  Tensor part_of(const Tensor& x) {
    LONGHAUL_CHECK(x.dim() > kSequence.dim(), "an input with {} dims has no sequence to cut",
                   x.dim());
    sequence_ = x.size(kSequence.dim());
    return dtensor::to_local(placed(x, *style_.input));
  }

  std::vector<int64_t> whole_sizes(const Tensor& part) const {
    auto sizes = part.sizes().vec();
    sizes[static_cast<size_t>(kSequence.dim())] = sequence_;
    return sizes;
  }

  nn::Module* module_;
  ParallelStyle style_;
  Mesh mesh_;
  int64_t sequence_ = 0;  // of the inputs under way
};

TensorParallel::TensorParallel(nn::Module& model, const TensorPlan& plan, const Mesh& mesh) {
  const auto modules = model.modules();
  check_named(plan, modules);
  for (const auto& parameter : model.parameters()) {
    const std::string module = module_of(parameter.name, modules);
    const auto* entry = entry_for(module, plan);
    LONGHAUL_CHECK(
        entry != nullptr,
        "tensor parallel plan: no entry for \"{}\", which has {}; add one with its style "
        "(tensor.h)",
        module, parameter.name);
    if (!entry->style.plain_parameters) {
      make_dtensor(*parameter.tensor, mesh, entry->style.parameters);
      continue;
    }
    LONGHAUL_CHECK(
        has_own_tokens(module, plan, modules),
        "tensor parallel plan: \"{}\" is no_parallel(), and no module around it has "
        "prepare_module_input_output with a cut input: {} ranks would add up the same gradient; "
        "add that, or make it sequence_parallel()",
        module, mesh->axis(0).size());
  }
  for (const auto& [name, module] : modules) {
    const auto* entry = entry_for(name, plan);
    if (entry != nullptr && (entry->style.input || entry->style.output)) {
      edges_.push_back(std::make_unique<Edge>(*module, entry->style, mesh));
    }
  }
}

TensorParallel::~TensorParallel() = default;

}  // namespace longhaul::parallel
