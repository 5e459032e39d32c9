#include "longhaul/train/peak.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>

#include "longhaul/ops/matmul/matmul.h"

namespace longhaul::train {

double measure_peak_flops(at::Device device, at::ScalarType dtype) {
  const int64_t n = device.is_cuda() ? 4096 : 1024;
  constexpr int kRuns = 5;
  const at::Tensor a = at::ones({n, n}, at::TensorOptions().dtype(dtype).device(device));
  const at::Tensor b = at::ones_like(a);
  const auto run = [&] {
    const auto start = std::chrono::steady_clock::now();
    // Reading one element waits for the device.
    ops::product(a, b)[0][0].item();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  run();
  double best = run();
  for (int i = 1; i < kRuns; ++i) best = std::min(best, run());
  return 2.0 * static_cast<double>(n * n * n) / best;
}

}  // namespace longhaul::train
