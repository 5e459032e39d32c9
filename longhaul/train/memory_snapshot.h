// Who held the memory of recorded steps: how much tensors held over time, and at the moment of the
// most, which named range and operator had asked for it. Called by the profiler.
#pragma once

#include <c10/core/DeviceType.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace torch::profiler::impl {
struct Result;
}

namespace longhaul::train {

struct MemorySnapshot {
  // Milliseconds since the first allocation, and what tensors hold from then on, in bytes.
  std::vector<std::pair<double, int64_t>> timeline;
  double peak_ms = 0;
  int64_t peak_bytes = 0;
  // Held since before the recording: weights, moments, data.
  int64_t held_before_bytes = 0;
  // What was asked for in the recording and held at the peak, the most first, by
  // "<innermost named range>: <outermost operator in it>".
  std::vector<std::pair<std::string, int64_t>> held_at_peak;
};

// From Kineto's events of a recording with memory; only what lies on `device` counts.
MemorySnapshot memory_snapshot(
    const std::vector<std::shared_ptr<torch::profiler::impl::Result>>& event_tree,
    c10::DeviceType device);

// The whole as JSON at `path`, and beside it the timeline as an SVG of the same name.
void write_memory_snapshot(const std::filesystem::path& path, const MemorySnapshot& snapshot);

}  // namespace longhaul::train
