// Tensor parallelism, with sequence parallelism between the parts that it cuts. A plan says for
// modules, by name, where their parameters lie on the tp axis and what their inputs and results
// become at their edges; everything in between follows from the sharding rules of dtensor/. The
// model is not asked: hooks (nn::ModuleHook) stand at the edges.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "longhaul/dtensor/dtensor.h"
#include "longhaul/nn/module.h"

namespace longhaul::parallel {

using at::Tensor;
using dtensor::Placement;

// How a module computes on the tp axis. The functions below make those that have a name in
// TorchTitan (ColwiseParallel, RowwiseParallel, SequenceParallel, NoParallel, PrepareModuleInput,
// PrepareModuleOutput, PrepareModuleInputOutput).
struct ParallelStyle {
  // Of the module's own parameters.
  Placement parameters = Placement::replicate();
  // What the first input and the result are redistributed to; none: as they come.
  std::optional<Placement> input = std::nullopt, output = std::nullopt;
  // Plain tensors inside: the inputs' parts in `input` go in, the result's part comes out in
  // `output`. A plain input is taken as one that every rank has.
  bool local = false;
  // Parameters stay plain tensors, whole on every rank or as another axis cuts them. Each rank's
  // gradient must be a term, and is summed over the axis.
  bool plain_parameters = false;
};

// The dim of [B, S, ...] that is cut between the modules, and what nothing cuts.
inline const Placement kSequence = Placement::shard(1), kWhole = Placement::replicate();
inline constexpr std::nullopt_t kAsItComes = std::nullopt;

// The output dim cut: y = x W^T has the columns of this rank's rows of W.
ParallelStyle colwise_parallel(std::optional<Placement> input = kWhole);
// The input dim cut; the result is terms, added up into slices of the sequence.
ParallelStyle rowwise_parallel(std::optional<Placement> output = kSequence);
// The same for a table of embeddings, whose input dim is its rows.
ParallelStyle rowwise_parallel_embedding(std::optional<Placement> output = kSequence);
// Whole parameters on slices of the sequence, as they come; gradients are terms.
ParallelStyle sequence_parallel();
// Whole plain parameters on plain tensors, this rank's part of the tokens: stands inside a module
// with prepare_module_input_output. Gradients are terms. For a module that computes the same on
// every rank there is no style: its gradients would count once for each; take sequence_parallel().
ParallelStyle no_parallel();
// Redistributes the input of a module whose insides have styles of their own.
ParallelStyle prepare_module_input(Placement input);
// Redistributes its result; a plain one is taken as one that every rank has.
ParallelStyle prepare_module_output(Placement output);
// Its insides compute on plain tensors: the parts of the inputs, which become a part of the result.
ParallelStyle prepare_module_input_output(Placement input, Placement output);

struct PlanEntry {
  std::string module;  // the end of its name: "self_attn.o_proj"; whole path parts only
  ParallelStyle style;
};
// Of the modules that the model has, and of no others.
using TensorPlan = std::vector<PlanEntry>;

class TensorParallel {
 public:
  // Makes DTensors of the model's parameters on `mesh` (of the one axis tp), as the plan says, and
  // sets the hooks, until its end. Of two entries the longer name counts. Parameters on the Meta
  // device get no memory. Error for a module with parameters that no entry names, an entry that
  // names no module, and a no_parallel() module that every rank would compute alike.
  TensorParallel(nn::Module& model, const TensorPlan& plan, const dtensor::Mesh& mesh);
  ~TensorParallel();
  TensorParallel(const TensorParallel&) = delete;

 private:
  class Edge;
  std::vector<std::unique_ptr<Edge>> edges_;
};

}  // namespace longhaul::parallel
