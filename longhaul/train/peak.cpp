#include "longhaul/train/peak.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "longhaul/base/clock.h"
#include "longhaul/ops/matmul/matmul.h"
#include "longhaul/train/device.h"

namespace longhaul::train {
namespace {

// Long beside a kernel's launch and the wait for its end.
constexpr double kSecondsOfARound = 0.01;
// Clocks rise and other processes step in: the best of this time, and of as many rounds at least.
constexpr double kSeconds = 0.1;
constexpr int kLeastRounds = 5;

}  // namespace

double measure_peak_flops(at::Device device, at::ScalarType dtype) {
  const int64_t n = device.is_cpu() ? 1024 : 4096;
  const at::Tensor a = at::ones({n, n}, at::TensorOptions().dtype(dtype).device(device));
  const at::Tensor b = at::ones_like(a);
  // Seconds of a product, of so many one behind the other.
  const auto run = [&](int64_t products) {
    synchronize(device);
    const auto start = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < products; ++i) ops::product(a, b);
    synchronize(device);
    return seconds_since(start) / static_cast<double>(products);
  };
  run(1);  // makes the library's choices and buffers
  const auto start = std::chrono::steady_clock::now();
  double best = run(1);
  const auto products = static_cast<int64_t>(std::ceil(kSecondsOfARound / best));
  for (int i = 1; i < kLeastRounds || seconds_since(start) < kSeconds; ++i) {
    best = std::min(best, run(products));
  }
  return 2.0 * static_cast<double>(n * n * n) / best;
}

}  // namespace longhaul::train
