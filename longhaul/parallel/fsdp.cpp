#include "longhaul/parallel/fsdp.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/custom_class.h>

#include <algorithm>

#include "longhaul/base/error.h"
#include "longhaul/nn/init.h"

namespace longhaul::parallel {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Callback : torch::CustomClassHolder {
  explicit Callback(std::function<void()> f) : f(std::move(f)) {}
  std::function<void()> f;
};

// The identity, whose backward pass calls a function once the gradients of all its outputs are
// complete. Autograd takes what was made later first, so all that the outputs went into has been
// differentiated by then, gradients of parameters included.
struct Notify : torch::autograd::Function<Notify> {
  static variable_list forward(AutogradContext* ctx, const c10::intrusive_ptr<Callback>& callback,
                               at::TensorList inputs) {
    ctx->saved_data["callback"] = c10::IValue::make_capsule(callback);
    ctx->set_materialize_grads(false);
    variable_list outputs;
    for (const auto& x : inputs) outputs.push_back(x.view_as(x));
    return outputs;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto callback =
        c10::static_intrusive_pointer_cast<Callback>(ctx->saved_data["callback"].toCapsule());
    callback->f();
    variable_list result = {Tensor()};  // of the callback
    result.insert(result.end(), grads.begin(), grads.end());
    return result;
  }
};

// Those of `tensors` that are differentiated, behind Notify. False if there are none.
bool notify_when_differentiated(std::vector<Tensor>& tensors, std::function<void()> f) {
  std::vector<Tensor> watched;
  for (const auto& x : tensors) {
    if (x.requires_grad()) watched.push_back(x);
  }
  if (!at::GradMode::is_enabled() || watched.empty()) return false;
  const auto callback = c10::make_intrusive<Callback>(std::move(f));
  const auto replaced = Notify::apply(callback, at::TensorList(watched));
  auto next = replaced.begin();
  for (auto& x : tensors) {
    if (x.requires_grad()) x = *next++;
  }
  return true;
}

bool in_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

}  // namespace

// One unit's state within a pass.
class Fsdp::HookedUnit : public nn::ModuleHook {
 public:
  HookedUnit(Fsdp& fsdp, const Unit& unit, const Options& options) : fsdp_(fsdp), unit_(unit) {
    for (const auto& [parameters, shard] : unit.groups) {
      groups.push_back(std::make_unique<ParameterGroup>(
          parameters, ParameterGroupOptions{.shard = shard,
                                            .replicate = options.replicate,
                                            .compute_dtype = options.compute_dtype,
                                            .device = options.device}));
    }
    for (auto* module : unit_.modules) module->add_hook(this);
  }
  ~HookedUnit() override {
    for (auto* module : unit_.modules) module->remove_hook(this);
  }

  std::vector<Tensor> before(std::vector<Tensor> inputs) override {
    unshard(in_backward());
    if (notify_when_differentiated(inputs, [this] { after_backward(); })) ++uses_;
    return inputs;
  }

  Tensor after(Tensor output) override {
    std::vector<Tensor> outputs = {std::move(output)};
    const bool differentiable = at::GradMode::is_enabled() && outputs[0].requires_grad();
    if (unit_.reshard_after_forward && !in_backward()) {
      // A loss that nothing travels on with was differentiated on the way.
      if (at::GradMode::is_enabled() && !differentiable) fsdp_.start_reduction(*this);
      reshard();
    }
    if (unit_.backward_needs_weights) {
      notify_when_differentiated(outputs, [this] { unshard(/*backward=*/true); });
    }
    return outputs[0];
  }

  // The end of the pass: what no node of autograd saw the end of.
  void finish() {
    if (!reduced_) fsdp_.start_reduction(*this);
    reshard();
    reduced_ = came_ = false;
    uses_ = 0;
  }

  void start_gather() {
    for (auto& group : groups) group->start_gather();
  }

  const Unit& unit() const { return unit_; }
  bool is_gathered() const {
    return std::all_of(groups.begin(), groups.end(), [](auto& g) { return g->is_gathered(); });
  }
  bool has_gradients() const {
    return std::any_of(groups.begin(), groups.end(), [](auto& g) { return g->has_gradients(); });
  }
  void mark_reduced() {
    LONGHAUL_CHECK(!reduced_, "{} was used again after its gradients were reduced",
                   groups[0]->names().front());
    reduced_ = true;
  }

  std::vector<std::unique_ptr<ParameterGroup>> groups;

 private:
  void unshard(bool backward) {
    const bool was_here = std::all_of(groups.begin(), groups.end(),
                                      [](auto& group) { return group->is_unsharded(); });
    for (auto& group : groups) group->unshard();
    // What is used again is not followed by the unit that comes after its first use.
    const bool came = std::exchange(came_, true);
    if (backward || !(was_here || came)) fsdp_.gather_ahead(*this, backward);
  }

  void reshard() {
    for (auto& group : groups) group->reshard();
  }

  void after_backward() {
    if (--uses_ > 0) return;
    fsdp_.start_reduction(*this);
    reshard();
  }

  Fsdp& fsdp_;
  Unit unit_;
  int uses_ = 0;  // differentiable ones whose backward pass is to come
  bool reduced_ = false;
  bool came_ = false;  // was used in this pass
};

Fsdp::Fsdp(const std::vector<Unit>& units, const Options& options) {
  for (const auto& unit : units) {
    units_.push_back(std::make_unique<HookedUnit>(*this, unit, options));
    for (auto& group : units_.back()->groups) {
      for (size_t i = 0; i < group->names().size(); ++i) {
        places_[group->names()[i]] = {group.get(), i};
      }
    }
  }
}

Fsdp::Fsdp() = default;
Fsdp::~Fsdp() = default;

void Fsdp::begin_pass(bool reduce_gradients) {
  reduces_ = reduce_gradients;
  backward_began_ = false;
}

void Fsdp::end_pass() {
  for (auto unit = units_.rbegin(); unit != units_.rend(); ++unit) (*unit)->finish();
  while (!reducing_.empty()) advance_reductions();
}

// One unit ahead: with more, more memory is taken and nothing is gained that one block's time does
// not hide already.
void Fsdp::gather_ahead(const HookedUnit& unit, bool backward) {
  if (!gathers_ahead_) return;
  const auto own = std::find_if(units_.begin(), units_.end(),
                                [&](const auto& other) { return other.get() == &unit; });
  if (!backward) {
    if (own + 1 != units_.end()) (*(own + 1))->start_gather();
    return;
  }
  // Whatever backward begins with, the last of the sequence comes first.
  const bool begins = !std::exchange(backward_began_, true);
  auto before = std::make_reverse_iterator(own);
  if (!unit.unit().in_sequence) {
    if (!begins) return;
    before = units_.rbegin();
  }
  const auto next = std::find_if(before, units_.rend(),
                                 [](const auto& other) { return other->unit().in_sequence; });
  if (next != units_.rend()) (*next)->start_gather();
}

void Fsdp::start_reduction(HookedUnit& unit) {
  if (!unit.has_gradients()) return;
  if (!reduces_) {
    for (auto& group : unit.groups) group->keep_gradients();
    return;
  }
  unit.mark_reduced();
  advance_reductions();
  for (auto& group : unit.groups) {
    if (!group->has_gradients()) continue;
    group->start_reduction();
    reducing_.push_back(group.get());
  }
}

// Each one's collectives take the time of one unit's backward pass.
void Fsdp::advance_reductions() {
  std::vector<ParameterGroup*> going_on;
  for (auto* group : reducing_) {
    if (group->advance_reduction()) going_on.push_back(group);
  }
  reducing_ = std::move(going_on);
}

const Fsdp::Place* Fsdp::find(const nn::NamedParameter& parameter) const {
  const auto found = places_.find(parameter.name);
  return found == places_.end() ? nullptr : &found->second;
}

nn::Part Fsdp::part_of(const nn::NamedParameter& parameter) const {
  const Place* place = find(parameter);
  return place ? place->group->part_of(place->index) : nn::whole(*parameter.tensor);
}

Tensor Fsdp::whole_of(const nn::NamedParameter& parameter, const Tensor& part) const {
  const Place* place = find(parameter);
  return place ? place->group->whole_of(place->index, part) : part.detach();
}

std::vector<Group> Fsdp::cut_by(const nn::NamedParameter& parameter) const {
  const Place* place = find(parameter);
  return place ? place->group->cut_by(place->index) : std::vector<Group>{};
}

}  // namespace longhaul::parallel
