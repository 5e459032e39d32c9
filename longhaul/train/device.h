// The device a run computes on: which one, when it is done, and how much memory it took. Called by
// the trainer and the commands.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "longhaul/config/job_config.h"

namespace longhaul::train {

// training.device: "auto" is CUDA if there is a device, else the CPU. Of several CUDA devices the
// current one. UserError if "cuda" is asked for and absent.
at::Device choose_device(const JobConfig& config);

// The same for a rank, numbered among those of this machine: each takes a CUDA device of its own,
// which becomes the current one. UserError if there are fewer.
at::Device choose_device_of_rank(const JobConfig& config, int local_rank);

// Waits until the device has done all that it was given. A CPU always has.
void synchronize(at::Device device);

// The most memory held so far, in bytes: on a CPU the process's resident set, else what libtorch's
// caching allocator has taken from the device for this process, cached blocks included.
int64_t peak_device_memory_bytes(at::Device device);

// The most that tensors on the device held at once so far, or since the last restart of the count,
// in bytes; nothing where the allocator does not count (on a CPU: another one than
// ops/cpu_allocator.h's).
std::optional<int64_t> most_tensor_bytes(at::Device device);
// Counts the most anew, from what they hold now.
void restart_most_tensor_bytes(at::Device device);

}  // namespace longhaul::train
