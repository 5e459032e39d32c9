#include "longhaul/train/memory.h"

#include <ATen/core/Tensor.h>

#include <algorithm>

#include "longhaul/dtensor/dtensor.h"
#include "longhaul/train/device.h"

namespace longhaul::train {
namespace {

int64_t bytes_of(const at::Tensor& x) {
  if (!x.defined()) return 0;
  const at::Tensor& own = dtensor::is_dtensor(x) ? dtensor::local_of(x) : x;
  return static_cast<int64_t>(own.nbytes());
}

}  // namespace

MemoryByKind measure_memory(const std::vector<nn::NamedParameter>& parameters,
                            const std::vector<nn::NamedParameter>& buffers,
                            const optim::AdamW& optimizer, at::Device device) {
  MemoryByKind memory;
  for (const auto& buffer : buffers) memory.weights += bytes_of(*buffer.tensor);
  for (const auto& parameter : parameters) {
    memory.weights += bytes_of(*parameter.tensor);
    memory.gradients += bytes_of(parameter.tensor->grad());
  }
  for (const auto& [name, state] : optimizer.state()) {
    memory.optimizer += bytes_of(state.exp_avg) + bytes_of(state.exp_avg_sq);
  }
  if (const auto most = most_tensor_bytes(device)) {
    const int64_t kept = memory.weights + memory.gradients + memory.optimizer;
    memory.activations = std::max<int64_t>(*most - kept, 0);
  }
  return memory;
}

}  // namespace longhaul::train
