// What the distributed forms of our operators share: each picks, axis by axis, where its inputs
// must lie for the parts to be computed alone (local_map in dtensor.h), from where they lie now. A
// cut input that is then wanted whole is said, once, as a rule's gathers are.
#pragma once

#include <torch/library.h>

#include <vector>

#include "longhaul/base/error.h"
#include "longhaul/dtensor/dtensor.h"
#include "longhaul/ops/kernel.h"

namespace longhaul::dtensor {

// How a kernel travels through the dispatcher.
inline ops::Kernel kernel_of(int64_t kernel) { return static_cast<ops::Kernel>(kernel); }

// The mesh of the first DTensor among `tensors`.
inline const Mesh& mesh_of(std::initializer_list<const Tensor*> tensors) {
  for (const Tensor* x : tensors) {
    if (is_dtensor(*x)) return spec_of(*x).mesh;
  }
  LONGHAUL_CHECK(false, "a distributed operator without a DTensor");
}

// Where x lies along one axis; a plain tensor is on every rank.
inline Placement placement_of(const Tensor& x, size_t axis) {
  return x.defined() && is_dtensor(x) ? spec_of(x).placements[axis] : Placement::replicate();
}

// Inputs and outputs of a local_map in the making, an axis at a time.
class Placing {
 public:
  // `op` is its name in messages.
  Placing(const char* op, const Mesh& mesh, std::vector<Tensor> inputs,
          std::vector<std::vector<int64_t>> outputs);

  size_t num_axes() const { return static_cast<size_t>(mesh_->num_axes()); }

  // Every rank computes the same.
  void replicate();

  // Each rank computes its share: the inputs in these placements (a replicated one then has a
  // gradient of terms), the outputs in those.
  void share(std::initializer_list<Placement> inputs, std::initializer_list<Placement> outputs);

  std::vector<Tensor> compute(
      const std::function<std::vector<Tensor>(std::vector<Tensor>)>& f) const {
    return local_map(mesh_, inputs_, outputs_, f);
  }

  // Where this rank's part of a tensor of these sizes begins, once all axes are placed.
  DeviceMesh::Box box_of_input(size_t i) const {
    return mesh_->local_box(inputs_[i].tensor.sizes(), inputs_[i].placements);
  }

 private:
  // Input i on the next axis. `reason` why a replicated one is wanted.
  void add(size_t i, Placement placement, Placement grad, const char* reason);

  const char* op_;
  Mesh mesh_;
  std::vector<LocalInput> inputs_;
  std::vector<LocalOutput> outputs_;
};

}  // namespace longhaul::dtensor
