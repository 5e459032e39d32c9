// How a tensor lies along one axis of a mesh, and which part of it a rank holds.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <string>

#include "longhaul/dtensor/communicator.h"

namespace longhaul::dtensor {

// Shard(dim): each rank of the axis holds a slice of that tensor dim. Replicate: each holds all of
// it. Partial(reduction): each holds a term, and the tensor is their reduction.
class Placement {
 public:
  static Placement shard(int64_t dim) { return {Kind::kShard, dim, Reduction::kSum}; }
  static Placement replicate() { return {Kind::kReplicate, 0, Reduction::kSum}; }
  static Placement partial(Reduction reduction = Reduction::kSum) {
    return {Kind::kPartial, 0, reduction};
  }

  bool is_shard() const { return kind_ == Kind::kShard; }
  bool is_shard(int64_t dim) const { return is_shard() && dim_ == dim; }
  bool is_replicate() const { return kind_ == Kind::kReplicate; }
  bool is_partial() const { return kind_ == Kind::kPartial; }
  bool is_partial(Reduction reduction) const { return is_partial() && reduction_ == reduction; }

  int64_t dim() const { return dim_; }  // of a shard
  Reduction reduction() const { return reduction_; }

  // "Shard(1)", "Replicate", "Partial(sum)".
  std::string text() const;

  // A number that no other placement has.
  int64_t code() const {
    return static_cast<int64_t>(kind_) << 16 | static_cast<int64_t>(reduction_) << 8 | dim_;
  }

  bool operator==(const Placement&) const = default;

 private:
  enum class Kind : uint8_t { kShard, kReplicate, kPartial };
  Placement(Kind kind, int64_t dim, Reduction reduction)
      : kind_(kind), reduction_(reduction), dim_(static_cast<int8_t>(dim)) {}

  Kind kind_;
  Reduction reduction_;
  int8_t dim_;
};

// One placement for each axis of the mesh. Where several axes shard one tensor dim, the first axis
// cuts the whole and each later one cuts the piece that is left.
using Placements = c10::SmallVector<Placement, 4>;

std::string text_of(const Placements& placements);  // "(Replicate, Shard(0))"

// The part [start, start + length) of `total` elements that piece `index` of `pieces` holds: pieces
// of ceil(total / pieces), of which the last may be short or empty.
struct Slice {
  int64_t start, length;
};
Slice slice_of(int64_t total, int64_t pieces, int64_t index);

}  // namespace longhaul::dtensor
