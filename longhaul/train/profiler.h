// The profiling.* section: of every profile_freq steps the last profiler_active ones are recorded
// by Kineto, after profiler_warmup steps that are observed but not kept (TorchTitan's schedule).
//   enable_profiling: a Chrome trace at save_traces_folder/iteration_N/rank0_trace.json and a table
//   of where the time went
//   enable_memory_snapshot: who held the memory (train/memory_snapshot.h), in
//   save_memory_snapshot_folder/iteration_N/rank0_memory_snapshot.json and .svg
// The first rank alone records. Called by the run.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "longhaul/config/job_config.h"
#include "longhaul/train/resolve_model.h"

namespace longhaul::train {

// What one operator took by itself, without the operators that it calls.
struct OperatorTime {
  std::string name;
  int64_t calls = 0;
  double seconds = 0;
};

struct StepProfile {
  std::vector<OperatorTime> operators;  // the longest first
  double seconds = 0;  // from the first recorded step's begin to the last one's end
  int64_t steps = 0;
  std::vector<std::filesystem::path> files = {};  // what the recording left
};

// Whether the job records steps at all.
bool records_steps(const JobConfig& config);

// Milliseconds and calls a step and the share of it by operator, the part outside of any, and the
// host's part, `host_seconds` of a step.
std::string to_table(const StepProfile& profile, double host_seconds);

// What the host does for a micro-batch of `rows` rows beside computing: the same forward and
// backward pass on the Meta device, where operators know only shapes. Reads no data. Seconds.
double measure_host_seconds(const JobConfig& config, const ResolvedModel& resolved, int64_t rows);

class Profiler {
 public:
  // Creates the folders that the recordings go to. FileError where nothing can be written into one,
  // which training would meet with its first recording only.
  explicit Profiler(const JobConfig& config);
  ~Profiler();

  // Around step number `step`. The second returns the profile after the last step of a recording,
  // whose files are then written.
  void begin_step(int64_t step, at::Device device);
  std::optional<StepProfile> end_step(int64_t step);

 private:
  // Of a recording that ends with this step; `folder` is one of the two keys.
  std::filesystem::path path_of(const std::string& folder, int64_t step, const char* name) const;
  enum class State { kOff, kWarmup, kRecording };
  State state_of(int64_t step) const;

  const JobConfig& config_;
  State state_ = State::kOff;
  at::DeviceType device_ = at::kCPU;
  int64_t steps_ = 0;
  std::chrono::steady_clock::time_point began_;  // the recording
};

}  // namespace longhaul::train
