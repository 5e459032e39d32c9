// Through libtorch's interfaces for any accelerator, so there is one source with and without CUDA:
// the CUDA half registers itself where it is linked (LONGHAUL_CUDA).
#include "longhaul/train/device.h"

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/detail/CUDAHooksInterface.h>

#include "longhaul/base/error.h"
#include "longhaul/base/system.h"

namespace longhaul::train {

at::Device choose_device(const JobConfig& config) {
  const std::string& wanted = config.training.device;
  const bool has_cuda = at::hasCUDA() && at::detail::getCUDAHooks().deviceCount() > 0;
  if (wanted == "cuda" && !has_cuda) {
    fail_setting(
        config, "training.device",
        "\"cuda\", but there is no CUDA device for this program (no driver, none visible, or "
        "built without CUDA: see `longhaul version`); set it to \"cpu\" or \"auto\"");
  }
  return wanted == "cuda" || (wanted == "auto" && has_cuda) ? at::Device(at::kCUDA, 0)
                                                            : at::Device(at::kCPU);
}

void synchronize(at::Device device) {
  if (!device.is_cpu()) at::accelerator::synchronizeDevice(device.index());
}

int64_t peak_device_memory_bytes(at::Device device) {
  if (device.is_cpu()) return peak_memory_bytes();
  constexpr auto kAll = static_cast<size_t>(at::CachingAllocator::StatType::AGGREGATE);
  return at::accelerator::getDeviceStats(device.index()).reserved_bytes[kAll].peak;
}

}  // namespace longhaul::train
