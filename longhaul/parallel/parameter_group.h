// Parameters that are gathered and whose gradients are reduced together: those of one unit of the
// model that are cut over the same ranks. Each rank keeps a piece of each parameter, cut along dim
// 0 (dtensor::slice_of); for its use all pieces are gathered by one collective, and its gradients
// go back to their pieces by another. Decides nothing about when: fsdp.h does.
//
// A parameter's slot in the model holds the shard, which the optimizer knows, or the whole, which
// the model computes with. Both are leaves of autograd and stay the same tensors for good: the
// whole loses its memory when it is released and gets it back filled again, below autograd, so
// whatever a forward pass saved of it is valid in the backward pass.
#pragma once

#include <string>
#include <vector>

#include "longhaul/nn/module.h"
#include "longhaul/parallel/parallel_dims.h"

namespace longhaul::parallel {

using at::Tensor;

struct ParameterGroupOptions {
  // The ranks that the parameters are cut over; one: they are not cut. All that hold the same of
  // them: the mesh of a DTensor that is whole on it lies in this group.
  Group shard;
  Group replicate;  // the ranks with equal pieces
  // Of the wholes, except of parameters that are used exactly as they are kept.
  at::ScalarType compute_dtype = at::kFloat;
  at::Device device = at::kCPU;
};

class ParameterGroup {
 public:
  // Cuts the parameters: from here on the slots hold shards. One that lies on the Meta device gets
  // memory on `device`, not filled; another keeps its values. Error for a parameter without dims.
  ParameterGroup(const std::vector<nn::NamedParameter>& parameters, ParameterGroupOptions options);

  // Weights. These do nothing where shards are wholes. Collective: start_gather.
  void start_gather();  // unless under way or done
  void unshard();       // starts the gather unless it is, waits for it; the slots hold wholes
  void reshard();       // the slots hold shards; the wholes' memory is freed
  bool is_gathered() const { return is_unsharded() || gathered_.defined(); }
  bool is_unsharded() const { return !swaps_ || unsharded_; }

  // Gradients of the wholes.
  bool has_gradients() const;
  // Sets them aside, added to those set aside before, until a later reduction.
  void keep_gradients();
  // Takes them, and those set aside: sums over `shard`, and over `replicate`, that become gradients
  // of the shards, in fp32 (fp64 for fp64). The terms of a DTensor's gradient (Partial) are summed
  // here, too (Error for other reductions); one that is complete on all ranks of its mesh counts
  // once, a plain one on every rank. A parameter that has none
  // here contributes zeros, and its shard gets none: which have one depends on the model, not on
  // the rank. Collective.
  void start_reduction();
  // Waits for the collective under way and starts the next or delivers; false: it was delivered.
  bool advance_reduction();

  // What part of the whole parameter a slot's shard is; by the parameter's number in the group.
  nn::Part part_of(size_t index) const;
  // The whole (global) tensor of the parts that the ranks hold, shaped like the shards: of
  // parameters, gradients or moments. Collective over `shard`, on each the same.
  Tensor whole_of(size_t index, const Tensor& part) const;
  // The groups whose ranks hold different elements of it.
  std::vector<Group> cut_by(size_t index) const;
  const std::vector<std::string>& names() const { return names_; }

 private:
  struct Entry {
    Tensor* slot;
    nn::Part part;               // of the shard in the global tensor
    std::vector<int64_t> sizes;  // of the whole on this rank (of a DTensor: its part)
    int64_t piece = 0;           // elements of a full piece
    int64_t own = 0;             // elements of this rank's
    int64_t gather_offset = 0;   // of the piece in a rank's bytes
    int64_t reduce_offset = 0;   // of the piece in a rank's elements; unused if frozen
    Tensor shard, whole;         // the same tensor where the slots do not swap
    Tensor memory;               // of the whole, outside autograd; where it is gathered
    Tensor kept;                 // gradient of earlier micro-batches, in the reduction's dtype

    bool trains() const { return shard.requires_grad(); }
  };
  struct Reduction {
    enum class Stage { kIdle, kScatter, kReplicate } stage = Stage::kIdle;
    Tensor sums;            // this rank's pieces
    std::vector<bool> has;  // by entry
    dtensor::Pending pending;
  };

  bool is_cut() const { return options_.shard->size() > 1; }
  void cut(Entry& entry, const nn::NamedParameter& parameter);
  at::ScalarType compute_dtype_of(const Tensor& local) const;
  void add_whole(Entry& entry, const Tensor& parameter, at::ScalarType dtype);
  Tensor take_gradient(size_t index);
  void fill_reduction(Tensor& pieces);
  void deliver();

  ParameterGroupOptions options_;
  at::ScalarType reduce_dtype_ = at::kFloat;
  std::vector<std::string> names_;
  std::vector<Entry> entries_;
  int64_t gather_bytes_ = 0, reduce_elements_ = 0;  // of one rank
  bool padded_ = false;                             // some piece is shorter than others
  bool swaps_ = false;                              // shards and wholes are different tensors
  bool unsharded_ = false;
  Tensor gathered_;  // [ranks, gather_bytes_] under way
  dtensor::Pending gather_;
  Reduction reduction_;
};

}  // namespace longhaul::parallel
