#include "longhaul/dtensor/device_mesh.h"

#include <algorithm>

#include "longhaul/base/error.h"
#include "longhaul/dtensor/dispatch_cache.h"
#include "longhaul/dtensor/world.h"

namespace longhaul::dtensor {
namespace {

std::string text_of_axes(const std::vector<DeviceMesh::AxisSize>& axes) {
  std::string text;
  for (const auto& axis : axes) {
    text += fmt::format("{}{} {}", text.empty() ? "" : " x ", axis.name, axis.size);
  }
  return text;
}

// The ranks whose coordinates equal those of `rank` outside `names`, ascending.
std::vector<int> members(const std::vector<DeviceMesh::AxisSize>& axes,
                         const std::vector<std::string>& names, int rank) {
  std::vector<int> ranks = {rank};
  int64_t stride = 1;
  for (auto axis = axes.rbegin(); axis != axes.rend(); stride *= axis->size, ++axis) {
    if (std::find(names.begin(), names.end(), axis->name) == names.end()) continue;
    const int64_t own = rank / stride % axis->size;
    std::vector<int> grown;
    for (int64_t i = 0; i < axis->size; ++i) {
      for (const int member : ranks) grown.push_back(member + static_cast<int>((i - own) * stride));
    }
    ranks = std::move(grown);
  }
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

// Of the slowest of the groups along `names`: every rank must price an axis alike, or they would
// choose different collectives.
Link link_along(const World& world, const std::vector<DeviceMesh::AxisSize>& axes,
                const std::vector<std::string>& names) {
  for (int rank = 0; rank < world.size(); ++rank) {
    if (world.host_of(members(axes, names, rank).front()) != world.host_of(rank)) {
      return kAcrossHosts;
    }
  }
  return kWithinHost;
}

}  // namespace

std::shared_ptr<const Communicator> flattened_axis(World& world,
                                                   const std::vector<DeviceMesh::AxisSize>& axes,
                                                   const std::vector<std::string>& names,
                                                   const std::string& flat_name) {
  return std::make_shared<const Communicator>(world.make_group(
      flat_name, members(axes, names, world.rank()), link_along(world, axes, names)));
}

Mesh DeviceMesh::make(World& world, const std::vector<AxisSize>& axes) {
  int64_t product = 1;
  for (const auto& axis : axes) product *= axis.size;
  LONGHAUL_CHECK(product == world.size(), "mesh {} has {} ranks, there are {}", text_of_axes(axes),
                 product, world.size());
  std::vector<std::shared_ptr<const Communicator>> communicators;
  communicators.reserve(axes.size());
  for (const auto& axis : axes) {
    communicators.push_back(flattened_axis(world, axes, {axis.name}, axis.name));
  }
  return std::make_shared<const DeviceMesh>(std::move(communicators));
}

DeviceMesh::DeviceMesh(std::vector<std::shared_ptr<const Communicator>> axes)
    : axes_(std::move(axes)), cache_(std::make_unique<DispatchCache>()) {}

DeviceMesh::~DeviceMesh() = default;

std::shared_ptr<const Communicator> DeviceMesh::shared_axis(const std::string& name) const {
  for (const auto& axis : axes_) {
    if (axis->axis() == name) return axis;
  }
  LONGHAUL_CHECK(false, "no mesh axis \"{}\" in {}", name, text());
}

const Communicator& DeviceMesh::axis(const std::string& name) const { return *shared_axis(name); }

bool DeviceMesh::has(const std::string& name) const {
  return std::any_of(axes_.begin(), axes_.end(),
                     [&](const auto& axis) { return axis->axis() == name; });
}

Mesh DeviceMesh::slice(const std::vector<std::string>& names) const {
  std::vector<std::shared_ptr<const Communicator>> axes;
  axes.reserve(names.size());
  for (const auto& name : names) axes.push_back(shared_axis(name));
  return std::make_shared<const DeviceMesh>(std::move(axes));
}

int64_t DeviceMesh::size() const {
  int64_t size = 1;
  for (const auto& axis : axes_) size *= axis->size();
  return size;
}

std::string DeviceMesh::text() const {
  std::vector<AxisSize> axes;
  axes.reserve(axes_.size());
  for (const auto& axis : axes_) axes.push_back({axis->axis(), axis->size()});
  return text_of_axes(axes);
}

DeviceMesh::Box DeviceMesh::local_box(at::IntArrayRef global_sizes,
                                      const Placements& placements) const {
  Box box{std::vector<int64_t>(global_sizes.size(), 0), global_sizes.vec()};
  for (size_t i = 0; i < axes_.size(); ++i) {
    if (!placements[i].is_shard()) continue;
    const auto dim = static_cast<size_t>(placements[i].dim());
    const Slice slice = slice_of(box.sizes[dim], axes_[i]->size(), axes_[i]->rank());
    box.offsets[dim] += slice.start;
    box.sizes[dim] = slice.length;
  }
  return box;
}

std::vector<int64_t> DeviceMesh::local_sizes(at::IntArrayRef global_sizes,
                                             const Placements& placements) const {
  return local_box(global_sizes, placements).sizes;
}

}  // namespace longhaul::dtensor
