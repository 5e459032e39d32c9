#include "longhaul/train/results/environment.h"

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/Parallel.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <fmt/format.h>
#include <torch/version.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <thread>

#include "longhaul/base/system.h"
#include "longhaul/ops/cpu/isa.h"
#include "longhaul/ops/matmul/matmul.h"

namespace longhaul::train {
namespace {

// The first "model name" of /proc/cpuinfo; other systems and architectures name none.
std::string cpu_model() {
  std::ifstream in("/proc/cpuinfo");
  for (std::string line; std::getline(in, line);) {
    if (!line.starts_with("model name")) continue;
    const size_t at = line.find(": ");
    return at == std::string::npos ? "" : line.substr(at + 2);
  }
  return "";
}

std::string host_name() {
  char name[256] = "";
  return ::gethostname(name, sizeof name - 1) == 0 ? name : "";
}

// As NVIDIA's driver lists them, one for each that this machine (or container) sees.
std::vector<std::string> gpu_models() {
  std::vector<std::string> models;
  std::error_code none;
  for (const auto& gpu : std::filesystem::directory_iterator("/proc/driver/nvidia/gpus", none)) {
    std::ifstream in(gpu.path() / "information");
    for (std::string line; std::getline(in, line);) {
      if (!line.starts_with("Model:")) continue;
      const size_t at = line.find_first_not_of(" \t", std::string_view("Model:").size());
      if (at != std::string::npos) models.push_back(line.substr(at));
    }
  }
  return models;
}

nlohmann::ordered_json gpu_facts(at::Device device) {
  const auto [free, total] = at::accelerator::getMemoryInfo(device.index());
  nlohmann::ordered_json json = {{"gpus", gpu_models()},
                                 {"gpus_of_this_process", at::accelerator::deviceCount()},
                                 {"gpu_memory_bytes", total}};
  const long version = at::hasCUDA() ? at::detail::getCUDAHooks().versionCUDART() : 0;
  if (version > 0) json["cuda"] = fmt::format("{}.{}", version / 1000, version % 1000 / 10);
  return json;
}

}  // namespace

std::string compiler_text() {
#if defined(__clang__)
  return fmt::format("clang {}.{}.{}", __clang_major__, __clang_minor__, __clang_patchlevel__);
#else
  return fmt::format("gcc {}.{}.{}", __GNUC__, __GNUC_MINOR__, __GNUC_PATCHLEVEL__);
#endif
}

std::string git_text() { return LONGHAUL_GIT; }

nlohmann::ordered_json environment(at::Device device, const Degrees& degrees) {
  nlohmann::ordered_json json = {
      {"longhaul", LONGHAUL_VERSION},
      {"libtorch", TORCH_VERSION},
      {"compiler", compiler_text()},
      {"host", host_name()},
      {"device", device.str()},
      {"cpu", cpu_model()},
      {"cpu_cores", std::thread::hardware_concurrency()},
      {"threads", at::get_num_threads()},
      {"memory_bytes", machine_memory_bytes()},
      {"kernels", std::string(cpu::name_of(cpu::chosen_isa().isa))},
      {"matmul", "fp32 by " + ops::fp32_product_kernels()},
      {"ranks", degrees.ranks},
      {"layout", degrees.ranks > 1 ? degrees.text() : "one rank"},
  };
  if (!git_text().empty()) json["git_at_configure"] = git_text();
  if (!device.is_cpu()) json.update(gpu_facts(device));
  return json;
}

}  // namespace longhaul::train
