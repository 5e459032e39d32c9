// Times operators on the reference path and on the fused kernels in one process, in bf16, and
// prints one JSON line each: name, seconds of the reference, of the fused kernel (medians).
// bench/operators.py calls it:
//   bench_operators REPEATS
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <string>

#include "longhaul/ops/cpu_allocator.h"
#include "longhaul/ops/grouped_matmul/grouped_matmul.h"
#include "longhaul/ops/moe_token_permute/moe_token_permute.h"
#include "longhaul/ops/rms_norm/rms_norm.h"

namespace longhaul {
namespace {

using at::Tensor;
using Clock = std::chrono::steady_clock;
using ops::Kernel;

// Those of bench/peers/operators.py.
constexpr int64_t kRows = 16384, kWidth = 2048, kChoices = 8, kExperts = 64, kExpertWidth = 1408;

double median_seconds(int repeats, const std::function<void()>& f) {
  std::vector<double> seconds;
  for (int i = 0; i <= repeats; ++i) {
    const auto start = Clock::now();
    f();
    if (i > 0) seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
  }
  std::sort(seconds.begin(), seconds.end());
  return seconds[seconds.size() / 2];
}

Tensor normal(at::IntArrayRef sizes) {
  return at::randn(sizes).to(at::kBFloat16).set_requires_grad(true);
}

// Forward alone and with the gradients of all leaves.
void compare(const std::string& name, int repeats, const std::vector<Tensor>& leaves,
             const std::function<Tensor(Kernel)>& f) {
  const Tensor dy = at::randn(f(Kernel::kReference).sizes()).to(at::kBFloat16);
  const auto both = [&](Kernel kernel) { torch::autograd::grad({f(kernel)}, leaves, {dy}); };
  const auto print = [&](const char* part, const std::function<void(Kernel)>& run) {
    fmt::print("{{\"name\": \"{}.{}\", \"reference\": {}, \"fused\": {}}}\n", name, part,
               median_seconds(repeats, [&] { run(Kernel::kReference); }),
               median_seconds(repeats, [&] { run(Kernel::kFused); }));
  };
  print("forward", f);
  print("forward_backward", both);
}

void run(int repeats) {
  at::manual_seed(1);
  const Tensor x = normal({kRows, kWidth}), gamma = normal({kWidth});
  compare("rms_norm", repeats, {x, gamma},
          [&](Kernel kernel) { return ops::rms_norm(x, gamma, 1e-6, kernel); });

  const int64_t tokens = kRows / kChoices;
  const Tensor experts = std::get<1>(at::rand({tokens, kExperts}).topk(kChoices));
  const auto order = ops::sort_by_expert(experts, kExperts);
  const Tensor hidden = normal({tokens, kWidth});
  compare("permute", repeats, {hidden},
          [&](Kernel kernel) { return ops::moe_token_permute(hidden, order, kernel); });
  const Tensor probs = at::rand({tokens, kChoices}).set_requires_grad(true);
  compare("unpermute", repeats, {x, probs},
          [&](Kernel kernel) { return ops::moe_token_unpermute(x, probs, order, kernel); });

  const Tensor weight = normal({kExperts, kExpertWidth, kWidth});
  compare("grouped_matmul", repeats, {x, weight},
          [&](Kernel kernel) { return ops::grouped_matmul(x, weight, order.counts_E, kernel); });
}

}  // namespace
}  // namespace longhaul

int main(int argc, char** argv) {
  if (argc != 2) {
    fmt::print(stderr, "usage: bench_operators REPEATS\n");
    return 2;
  }
  longhaul::ops::install_cpu_allocator();
  longhaul::run(std::stoi(argv[1]));
  return 0;
}
