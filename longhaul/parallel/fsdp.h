// Fully sharded data parallelism (FSDP2's design): each rank keeps a piece of every parameter, and
// a unit of the model (a block) has its parameters whole only while it computes. The next unit's
// are gathered, asynchronously, before one computes: forwards in the forward pass, backwards in the
// backward pass. After a unit's backward pass its gradients are reduced and scattered while the
// units before it go on. With dp_replicate the sums then go over the copies, too. Gradients are
// sums, not means: losses are divided once by the global number of labels.
//
// A piece, with its gradient and moments, is a plain tensor whose place in the whole part_of()
// says, not a DTensor; only the whole of a unit's parameter is one, where tensor parallelism made
// it so.
//
// The model is not asked: hooks (nn::ModuleHook) act around each unit. Every rank must call the
// units in the same order.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "longhaul/parallel/parameter_group.h"

namespace longhaul::parallel {

class Fsdp {
 public:
  // What is gathered together, as one of the hooked `modules` begins to compute.
  struct Unit {
    std::vector<nn::Module*> modules;
    // Cut over the same ranks each.
    std::vector<std::pair<std::vector<nn::NamedParameter>, Group>> groups;
    // Let go of the wholes as soon as a module has computed, and gather them again for the next one
    // and for the backward pass; else they stay until the unit's gradients are complete.
    bool reshard_after_forward = true;
    // Of the ones that follow each other, in both passes; others are used beside these.
    bool in_sequence = true;
    bool backward_needs_weights = true;
  };
  struct Options {
    Group replicate;
    at::ScalarType compute_dtype = at::kFloat;
    at::Device device = at::kCPU;
  };

  // None: a model on a single rank, for which all of the below does nothing.
  Fsdp();
  // Cuts the parameters and sets the modules' hooks, until its end; see ParameterGroup. `units` in
  // the order in which forward passes come to them first.
  Fsdp(const std::vector<Unit>& units, const Options& options);
  ~Fsdp();
  Fsdp(const Fsdp&) = delete;

  // Around one forward pass and its backward pass, if it has one. With reduce_gradients the
  // gradients of this pass and of earlier ones end in the shards; else they wait for a later pass.
  // Collective; after end_pass() nothing is under way.
  void begin_pass(bool reduce_gradients);
  void end_pass();

  // Off: a unit's weights are gathered when it asks for them, and nothing hides the time that this
  // takes. For measurements of what is hidden; results are the same.
  void set_gather_ahead(bool ahead) { gathers_ahead_ = ahead; }

  // Of a parameter of the model; one that is in no unit is whole. See ParameterGroup.
  nn::Part part_of(const nn::NamedParameter& parameter) const;
  Tensor whole_of(const nn::NamedParameter& parameter, const Tensor& part) const;
  std::vector<Group> cut_by(const nn::NamedParameter& parameter) const;

 private:
  class HookedUnit;
  struct Place {
    ParameterGroup* group;
    size_t index;
  };

  const Place* find(const nn::NamedParameter& parameter) const;
  void gather_ahead(const HookedUnit& unit, bool backward);
  void start_reduction(HookedUnit& unit);
  void advance_reductions();

  std::vector<std::unique_ptr<HookedUnit>> units_;
  std::map<std::string, Place> places_;  // by parameter name
  bool reduces_ = true, backward_began_ = false, gathers_ahead_ = true;
  std::vector<ParameterGroup*> reducing_;  // oldest first
};

}  // namespace longhaul::parallel
