#include "longhaul/train/memory_snapshot.h"

#include <torch/csrc/profiler/collection.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "longhaul/base/file.h"
#include "longhaul/train/results/thinning.h"
#include "longhaul/train/summary.h"

namespace longhaul::train {
namespace {

using torch::profiler::impl::EventType;
using torch::profiler::impl::ExtraFields;
using torch::profiler::impl::Result;

struct Allocation {
  int64_t at_ns = 0;
  const void* place = nullptr;
  int64_t bytes = 0;  // negative: given back
  int64_t held_bytes = 0;
  std::string owner;
};

// Where in the tree one is.
struct Path {
  std::string range = "outside of a step", op;
};

class Walk {
 public:
  explicit Walk(c10::DeviceType device) : device_(device) {}

  void visit(const Result& event, const Path& above) {
    Path path = above;
    event.visit([&](const auto& fields) {
      using Fields = std::decay_t<decltype(fields)>;
      if constexpr (std::is_same_v<Fields, ExtraFields<EventType::TorchOp>>) {
        if (fields.scope_ == at::RecordScope::USER_SCOPE) {
          path = {fields.name_, ""};
        } else if (path.op.empty()) {
          path.op = fields.name_;
        }
      } else if constexpr (std::is_same_v<Fields, ExtraFields<EventType::Allocation>>) {
        add(event.start_time_ns_, fields, path);
      }
    });
    for (const auto& child : event.children_) visit(*child, path);
  }

  // In the order of time.
  std::vector<Allocation> take() {
    std::stable_sort(found_.begin(), found_.end(),
                     [](const auto& a, const auto& b) { return a.at_ns < b.at_ns; });
    return std::move(found_);
  }

 private:
  void add(int64_t at_ns, const ExtraFields<EventType::Allocation>& fields, const Path& path) {
    if (fields.device_type_ != device_) return;
    found_.push_back({.at_ns = at_ns,
                      .place = fields.ptr_,
                      .bytes = fields.alloc_size_,
                      .held_bytes = static_cast<int64_t>(fields.total_allocated_),
                      .owner = path.op.empty() ? path.range : path.range + ": " + path.op});
  }

  c10::DeviceType device_;
  std::vector<Allocation> found_;
};

using Owners = std::map<std::string, int64_t>;

// What allocations[0 .. end) left behind, by owner.
Owners held_after(const std::vector<Allocation>& allocations, size_t end) {
  std::map<const void*, const Allocation*> live;
  for (size_t i = 0; i < end; ++i) {
    const auto& one = allocations[i];
    if (one.bytes > 0) {
      live[one.place] = &one;
    } else {
      live.erase(one.place);
    }
  }
  Owners owners;
  for (const auto& [place, one] : live) owners[one->owner] += one->bytes;
  return owners;
}

// Few enough points to draw, in MiB.
std::vector<std::pair<double, double>> curve_of(
    const std::vector<std::pair<double, int64_t>>& timeline) {
  constexpr size_t kStretches = 1000;
  constexpr double kMiB = 1 << 20;
  std::vector<std::pair<double, double>> points;
  for (const auto& [ms, bytes] : thinned(timeline, kStretches)) {
    points.emplace_back(ms, static_cast<double>(bytes) / kMiB);
  }
  return points;
}

}  // namespace

MemorySnapshot memory_snapshot(const std::vector<std::shared_ptr<Result>>& event_tree,
                               c10::DeviceType device) {
  Walk walk(device);
  for (const auto& root : event_tree) walk.visit(*root, {});
  const auto allocations = walk.take();
  MemorySnapshot snapshot;
  if (allocations.empty()) return snapshot;
  size_t peak = 0;
  for (size_t i = 0; i < allocations.size(); ++i) {
    const auto& one = allocations[i];
    snapshot.timeline.emplace_back(1e-6 * static_cast<double>(one.at_ns - allocations[0].at_ns),
                                   one.held_bytes);
    if (one.held_bytes > allocations[peak].held_bytes) peak = i;
  }
  snapshot.peak_ms = snapshot.timeline[peak].first;
  snapshot.peak_bytes = allocations[peak].held_bytes;
  snapshot.held_before_bytes = snapshot.peak_bytes;
  for (const auto& [owner, bytes] : held_after(allocations, peak + 1)) {
    snapshot.held_before_bytes -= bytes;
    snapshot.held_at_peak.emplace_back(owner, bytes);
  }
  std::stable_sort(snapshot.held_at_peak.begin(), snapshot.held_at_peak.end(),
                   [](const auto& a, const auto& b) { return a.second > b.second; });
  return snapshot;
}

void write_memory_snapshot(const std::filesystem::path& path, const MemorySnapshot& snapshot) {
  nlohmann::ordered_json json = {{"peak_bytes", snapshot.peak_bytes},
                                 {"peak_ms", snapshot.peak_ms},
                                 {"held_before_bytes", snapshot.held_before_bytes},
                                 {"held_at_peak", nlohmann::ordered_json::array()},
                                 {"timeline_ms_bytes", snapshot.timeline}};
  for (const auto& [owner, bytes] : snapshot.held_at_peak) {
    json["held_at_peak"].push_back({{"owner", owner}, {"bytes", bytes}});
  }
  write_atomic(path, json.dump(1) + "\n");
  write_atomic(std::filesystem::path(path).replace_extension(".svg"),
               plot_svg({{"held by tensors", curve_of(snapshot.timeline)}}, "milliseconds", "MiB"));
}

}  // namespace longhaul::train
