// A tensor whose parts lie on the ranks of a mesh. It has the sizes of the whole, holds this rank's
// part, and is an at::Tensor like any other: ATen's operators take it, compute on the parts by the
// rules of rules/, and autograd works above it. Every rank calls the same operators in the same
// order. A tensor that is no DTensor may stand beside one only if it has no dims (a number).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "longhaul/dtensor/device_mesh.h"
#include "longhaul/dtensor/placement.h"

namespace longhaul::dtensor {

struct Spec {
  Mesh mesh;
  Placements placements;
};

inline bool is_dtensor(const Tensor& x) {
  return x.defined() && x.key_set().has_backend(c10::BackendComponent::PrivateUse2Bit);
}

// Of a DTensor; Error for another tensor.
const Spec& spec_of(const Tensor& x);
// This rank's part, outside autograd. Shares memory with x.
const Tensor& local_of(const Tensor& x);
// Sizes and placements for a message: "[4, 6] (Shard(0)), [6] plain, none".
std::string describe(const std::vector<Tensor>& tensors);
// The whole of sizes and strides `like` whose part on this rank is `local`, outside autograd.
Tensor wrap(const Tensor& local, Spec spec, at::IntArrayRef global_sizes,
            at::IntArrayRef global_strides);

// Strides of a dense tensor of `sizes` whose dims stand in memory in the order of `ordered_like`.
std::vector<int64_t> dense_strides(at::IntArrayRef sizes, const Tensor& ordered_like);

// This rank's part of `whole`, which all ranks hold alike, as a leaf; no communication.
Tensor distribute(const Tensor& whole, const Mesh& mesh, const Placements& placements);

// A DTensor of the parts `local`; differentiable. The size of a sharded dim is the sum of the
// parts' sizes: without `global_sizes` all parts must be equally long there. Parts of a replicated
// tensor are taken to be equal, not compared. Error for a maximum or minimum that needs a gradient.
Tensor from_local(const Tensor& local, const Mesh& mesh, const Placements& placements,
                  at::OptionalIntArrayRef global_sizes = std::nullopt);

// This rank's part; differentiable. `grad_placements` says what the parts of its gradient are:
// by default the placements of x, with Replicate for Partial. A replicated x whose users differ by
// rank has a Partial gradient.
Tensor to_local(const Tensor& x, const std::optional<Placements>& grad_placements = std::nullopt);

// The same tensor in other placements; differentiable. The gradient goes back to the placements of
// x, except that a Partial gradient of a replicated x stays Partial: it is reduced where it must.
Tensor redistribute(const Tensor& x, const Placements& placements);

// The whole on every rank; differentiable, with the gradient taken as equal on all ranks.
Tensor full_tensor(const Tensor& x);

// What local_map hands to its function and takes back.
struct LocalInput {
  Tensor tensor;          // a DTensor, or a tensor that every rank holds alike; may be undefined
  Placements placements;  // that the function wants its part in
  Placements grads;       // of the gradient that the function's backward gives for it
};
struct LocalOutput {
  Placements placements;
  std::vector<int64_t> sizes;  // of the whole; empty: as many as the parts, which are equal
};

// Computes on parts: redistributes the inputs, calls f on this rank's and makes DTensors of what it
// returns. Differentiable through f.
std::vector<Tensor> local_map(const Mesh& mesh, const std::vector<LocalInput>& inputs,
                              const std::vector<LocalOutput>& outputs,
                              const std::function<std::vector<Tensor>(std::vector<Tensor>)>& f);

}  // namespace longhaul::dtensor
