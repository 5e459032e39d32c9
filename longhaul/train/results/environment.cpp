#include "longhaul/train/results/environment.h"

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <torch/version.h>

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

}  // namespace

std::string compiler_text() {
#if defined(__clang__)
  return fmt::format("clang {}.{}.{}", __clang_major__, __clang_minor__, __clang_patchlevel__);
#else
  return fmt::format("gcc {}.{}.{}", __GNUC__, __GNUC_MINOR__, __GNUC_PATCHLEVEL__);
#endif
}

std::string git_text() { return LONGHAUL_GIT; }

nlohmann::ordered_json environment(const std::string& device, const Degrees& degrees) {
  nlohmann::ordered_json json = {
      {"longhaul", LONGHAUL_VERSION},
      {"libtorch", TORCH_VERSION},
      {"compiler", compiler_text()},
      {"device", device},
      {"cpu", cpu_model()},
      {"cpu_cores", std::thread::hardware_concurrency()},
      {"threads", at::get_num_threads()},
      {"memory_bytes", machine_memory_bytes()},
      {"kernels", std::string(cpu::name_of(cpu::chosen_isa().isa))},
      {"matmul", "fp32 by " + ops::fp32_product_kernels()},
      {"ranks", degrees.ranks},
      {"layout", degrees.ranks > 1 ? degrees.text() : "one rank"},
  };
  if (!git_text().empty()) json["git"] = git_text();
  return json;
}

}  // namespace longhaul::train
