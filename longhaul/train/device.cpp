// Through libtorch's interfaces for any accelerator, so there is one source with and without CUDA:
// the CUDA half registers itself where it is linked (LONGHAUL_CUDA).
#include "longhaul/train/device.h"

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/detail/CUDAHooksInterface.h>

#include "longhaul/base/error.h"
#include "longhaul/base/system.h"
#include "longhaul/ops/cpu_allocator.h"

namespace longhaul::train {
namespace {

constexpr auto kAll = static_cast<size_t>(at::CachingAllocator::StatType::AGGREGATE);

}  // namespace

at::Device choose_device(const JobConfig& config) {
  const std::string& wanted = config.training.device;
  const bool has_cuda = at::hasCUDA() && at::detail::getCUDAHooks().deviceCount() > 0;
  if (wanted == "cuda" && !has_cuda) {
    fail_setting(
        config, "training.device",
        "\"cuda\", but there is no CUDA device for this program (no driver, none visible, or "
        "built without CUDA: see `longhaul version`); set it to \"cpu\" or \"auto\"");
  }
  if (wanted == "cpu" || !has_cuda) return at::kCPU;
  return at::Device(at::kCUDA, at::accelerator::getDeviceIndex());
}

at::Device choose_device_of_rank(const JobConfig& config, int local_rank) {
  if (choose_device(config).is_cpu()) return at::kCPU;
  const int devices = at::accelerator::deviceCount();
  if (local_rank >= devices) {
    const std::string why = fmt::format(
        "rank {} of this machine has no CUDA device of its own, there {} {}; start fewer ranks "
        "here, or set it to \"cpu\"",
        local_rank, devices == 1 ? "is" : "are", devices);
    fail_setting(config, "training.device", why);
  }
  at::accelerator::setDeviceIndex(narrow<c10::DeviceIndex>(local_rank));
  return choose_device(config);
}

void synchronize(at::Device device) {
  if (!device.is_cpu()) at::accelerator::synchronizeDevice(device.index());
}

int64_t peak_device_memory_bytes(at::Device device) {
  if (device.is_cpu()) return peak_memory_bytes();
  return at::accelerator::getDeviceStats(device.index()).reserved_bytes[kAll].peak;
}

std::optional<int64_t> most_tensor_bytes(at::Device device) {
  if (!device.is_cpu()) {
    return at::accelerator::getDeviceStats(device.index()).allocated_bytes[kAll].peak;
  }
  const int64_t bytes = ops::most_cpu_tensor_bytes();
  return bytes > 0 ? std::optional(bytes) : std::nullopt;
}

void restart_most_tensor_bytes(at::Device device) {
  device.is_cpu() ? ops::restart_most_cpu_tensor_bytes()
                  : at::accelerator::resetPeakStats(device.index());
}

}  // namespace longhaul::train
