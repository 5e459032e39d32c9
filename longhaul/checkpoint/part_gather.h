// Brings the parts that ranks hold of tensors to the ranks that write them. Each element moves once
// to a rank that writes it, and what several ranks hold is sent by one of them. Called by save(),
// stage() and export_hf().
#pragma once

#include <map>
#include <string>
#include <vector>

#include "longhaul/checkpoint/checkpoint.h"

namespace longhaul::checkpoint {

// Which boxes of each tensor the ranks hold.
class PartPlan {
 public:
  struct Box {
    std::vector<int64_t> offsets, sizes;
    std::vector<int> holders;  // the ranks that have it
  };
  struct Piece {
    int sender;
    const Box* box;
  };

  // Tells the ranks which boxes each holds; collective. Error, on all ranks, that names a tensor of
  // which a rank has no part, or whose boxes lie outside of it or have not as many elements.
  PartPlan(const Snapshot& snapshot, const dtensor::Communicator& ranks);

  // Who sends which box of it to the rank that writes it, in the order of the senders, each of
  // which has one. The writer counts as the sender of what it holds itself.
  std::vector<Piece> pieces(const std::string& name, int writer) const;

  // Whether that rank is one of the senders.
  bool takes_from(int rank, const std::string& name, int writer) const;

 private:
  std::map<std::string, std::vector<Box>> boxes_;  // distinct ones, not empty
};

// The tensor that this rank writes, on the host; `written` has the name of what each rank writes,
// empty if it is nothing: then the result is undefined. The plan is the snapshot's. Collective.
at::Tensor gather_parts(const PartPlan& plan, const Snapshot& snapshot,
                        const dtensor::Communicator& ranks,
                        const std::vector<std::string>& written);

}  // namespace longhaul::checkpoint
