// Brings the parts that ranks hold of tensors to the ranks that write them. Each element moves
// once, and what several ranks hold is sent by one of them. Called by save() and stage() only.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "longhaul/checkpoint/save_plan.h"

namespace longhaul::checkpoint {

class PartGather {
 public:
  // Tells the ranks which boxes each holds; collective. `snapshot` and `ranks` must outlive this.
  // Error, on all ranks, that names a tensor of which a rank has no part, or whose boxes lie
  // outside of it or have not as many elements.
  PartGather(const Snapshot& snapshot, const std::vector<Shard>& shards,
             const dtensor::Communicator& ranks);

  // Whether this rank's part is the one that is sent (or written by itself).
  bool takes_own(const std::string& name) const;

  // The tensor that this rank writes, on the host; `written` has what each rank writes, or null.
  // Undefined if this rank writes none. Collective.
  at::Tensor gather(const std::vector<const safetensors::TensorInfo*>& written) const;

 private:
  struct Piece {
    int sender;
    std::vector<int64_t> offsets, sizes;
  };
  using Pieces = std::vector<Piece>;  // in the order of their senders

  Pieces pieces_of(const safetensors::TensorInfo& info, const int64_t* boxes, int64_t stride,
                   int writer) const;
  void check_cover(const safetensors::TensorInfo& info, const Pieces& pieces) const;
  void fill(at::Tensor& whole, const std::string& name, const at::Tensor& bytes) const;

  const Snapshot& snapshot_;
  const dtensor::Communicator& ranks_;
  std::map<std::string, Pieces> pieces_;
};

}  // namespace longhaul::checkpoint
