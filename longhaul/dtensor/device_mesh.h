// The ranks as a grid with named axes, as one rank sees it: for each axis the communicator of the
// ranks that differ from it in that coordinate alone.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "longhaul/dtensor/communicator.h"
#include "longhaul/dtensor/placement.h"

namespace longhaul::dtensor {

class World;
class DispatchCache;

class DeviceMesh {
 public:
  struct AxisSize {
    std::string name;
    int64_t size;
  };

  // Makes the groups of all axes; collective over all ranks of `world`, whose number must be the
  // product of the sizes. The last axis varies fastest with the rank.
  static std::shared_ptr<const DeviceMesh> make(World& world, const std::vector<AxisSize>& axes);

  // A mesh of communicators that exist already, in the order in which they cut a tensor.
  explicit DeviceMesh(std::vector<std::shared_ptr<const Communicator>> axes);
  ~DeviceMesh();

  // The mesh of some of the axes, in the order given. Error that lists the names for an unknown
  // one.
  std::shared_ptr<const DeviceMesh> slice(const std::vector<std::string>& names) const;

  // The same axes in the same order: slices made one by one are one mesh.
  bool operator==(const DeviceMesh& other) const { return axes_ == other.axes_; }

  int num_axes() const { return static_cast<int>(axes_.size()); }
  const Communicator& axis(int i) const { return *axes_[static_cast<size_t>(i)]; }
  const Communicator& axis(const std::string& name) const;
  std::shared_ptr<const Communicator> shared_axis(const std::string& name) const;
  bool has(const std::string& name) const;
  int64_t size() const;      // ranks
  std::string text() const;  // "dp_shard 2 x tp 4"

  // The sizes of this rank's part of a tensor, and where it begins in it.
  struct Box {
    std::vector<int64_t> offsets, sizes;
  };
  Box local_box(at::IntArrayRef global_sizes, const Placements& placements) const;
  std::vector<int64_t> local_sizes(at::IntArrayRef global_sizes,
                                   const Placements& placements) const;

  // What the dispatcher has decided for operators on this mesh (dispatch.cpp).
  DispatchCache& cache() const { return *cache_; }

 private:
  std::vector<std::shared_ptr<const Communicator>> axes_;
  std::unique_ptr<DispatchCache> cache_;
};

using Mesh = std::shared_ptr<const DeviceMesh>;

// The groups of flattened axes: the ranks of `world`, laid out as `axes`, that differ from this one
// in the named axes only. Collective over all ranks of the world.
std::shared_ptr<const Communicator> flattened_axis(World& world,
                                                   const std::vector<DeviceMesh::AxisSize>& axes,
                                                   const std::vector<std::string>& names,
                                                   const std::string& flat_name);

}  // namespace longhaul::dtensor
