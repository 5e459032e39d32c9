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

// How a module computes on the tp axis.
struct ParallelStyle {
  Placement parameters = Placement::replicate();
  // What the first input and the result are redistributed to; none: as they come.
  std::optional<Placement> input = std::nullopt, output = std::nullopt;
  // Plain tensors inside: the inputs' parts in `input` go in, the result's part comes out in
  // `output`. A plain input is taken as one that every rank has.
  bool local = false;
  // Not of this axis: parameters stay plain tensors, used as they are.
  bool untouched = false;
};

// The output dim cut: y = x W^T has the columns of this rank's rows of W.
ParallelStyle colwise();
// The input dim cut, and the terms of the result added up into slices of the sequence.
ParallelStyle rowwise();
// Whole parameters on slices of the sequence; nothing to do at the edges.
ParallelStyle sequence_parallel();
// Whole parameters on whole or cut tensors, as they come: no parallelism in itself.
ParallelStyle no_parallel();
// Redistributes the input of a module whose insides have styles of their own.
ParallelStyle prepare_input(Placement input);
// Redistributes the result.
ParallelStyle prepare_output(Placement output);

struct PlanEntry {
  std::string module;  // the end of its name: "self_attn.o_proj"; whole path parts only
  ParallelStyle style;
};
using TensorPlan = std::vector<PlanEntry>;

class TensorParallel {
 public:
  // Makes DTensors of the model's parameters on `mesh` (of the one axis tp), as the plan says or
  // else replicated, and sets the hooks, until its end. Of two entries the longer name counts.
  // Parameters on the Meta device get no memory. Error for an entry that no module has.
  TensorParallel(nn::Module& model, const TensorPlan& plan, const dtensor::Mesh& mesh);
  ~TensorParallel();
  TensorParallel(const TensorParallel&) = delete;

 private:
  class Edge;
  std::vector<std::unique_ptr<Edge>> edges_;
};

}  // namespace longhaul::parallel
