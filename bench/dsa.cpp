// Times the core of DeepSeek Sparse Attention, stage by stage, at one shape in bf16, and prints one
// JSON object: seconds (medians), FLOPs, the peak of a loop on registers, bytes. bench/dsa.py calls
// it:
//   bench_dsa S H C R Hi Di K REPEATS fused|eager
// eager: the reference operators, small ones of ATen in fp32 on the bf16 inputs.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <chrono>
#include <functional>

#include "include/longhaul/kernels.h"
#include "longhaul/base/system.h"
#include "longhaul/ops/indexer_kl_loss/indexer_kl_loss.h"
#include "longhaul/ops/lightning_indexer/lightning_indexer.h"
#include "longhaul/ops/sparse_flash_attention/sparse_flash_attention.h"

namespace longhaul {
namespace {

using at::Tensor;
using Clock = std::chrono::steady_clock;

struct Shape {
  int64_t S, H, C, R, Hi, Di, K;
};

struct Inputs {
  Tensor query, key, index_query, index_key, index_weights, doc_start, d_out;
};

Inputs make_inputs(const Shape& s) {
  at::manual_seed(1);
  const auto normal = [](at::IntArrayRef sizes) { return at::randn(sizes).to(at::kBFloat16); };
  return {.query = normal({1, s.S, s.H, s.C + s.R}),
          .key = normal({1, s.S, s.C + s.R}),
          .index_query = normal({1, s.S, s.Hi, s.Di}),
          .index_key = normal({1, s.S, s.Di}),
          .index_weights = at::randn({1, s.S, s.Hi}) / std::sqrt(double(s.Hi * s.Di)),
          .doc_start = at::zeros({1, s.S}, at::kLong),
          .d_out = normal({1, s.S, s.H, s.C})};
}

double seconds_of(const std::function<void()>& stage) {
  const auto start = Clock::now();
  stage();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

struct Times {
  std::vector<double> select, attend, backward;
};

double median(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  return x[x.size() / 2];
}

// Selection; attention with the head sum; then the loss with its gradients and attention's
// backward.
void run_once(const Shape& s, const Inputs& in, ops::Kernel kernel, Times& times) {
  ops::IndexerSelection selection;
  times.select.push_back(seconds_of([&] {
    selection = ops::lightning_indexer(in.index_query, in.index_key, in.index_weights, in.doc_start,
                                       s.K, kernel);
  }));
  const std::vector<Tensor> leaves = {in.query.detach().set_requires_grad(true),
                                      in.key.detach().set_requires_grad(true)};
  const ops::IndexerInputs indexer{in.index_query.detach().set_requires_grad(true),
                                   in.index_key.detach().set_requires_grad(true),
                                   in.index_weights.detach().set_requires_grad(true)};
  ops::AttentionResult result;
  times.attend.push_back(seconds_of([&] {
    result = ops::sparse_flash_attention(leaves[0], leaves[1], {}, selection.indices_BSK,
                                         {.scale = 1 / std::sqrt(double(s.C + s.R)),
                                          .value_dim = s.C,
                                          .return_head_sum = true,
                                          .kernel = kernel});
  }));
  times.backward.push_back(seconds_of([&] {
    const Tensor loss = ops::sparse_indexer_kl_loss(indexer, selection.indices_BSK, result.head_sum,
                                                    kernel, selection.scores_BSK);
    torch::autograd::grad({result.out_BSHV}, leaves, {in.d_out});
    torch::autograd::grad({loss}, {indexer.query_BSHD, indexer.key_BSD, indexer.weights_BSH});
  }));
}

struct Flops {
  double select, attend, backward;
};

// Multiplications and additions of the products; selected pairs are what the sequence has.
Flops count_flops(const Shape& s) {
  const double pairs = 0.5 * double(s.S) * double(s.S + 1);
  const double full = double(std::min(s.K, s.S));
  const double selected = full * (full + 1) / 2 + (double(s.S) - full) * full;
  const double D = double(s.C + s.R), V = double(s.C), H = double(s.H);
  return {.select = 2 * double(s.Hi * s.Di) * pairs,
          .attend = 2 * H * (D + V) * selected,
          .backward = 2 * (H * (3 * D + 2 * V) + 3 * double(s.Hi * s.Di)) * selected};
}

int64_t bytes_of(const Shape& s, const Inputs& in) {
  int64_t bytes = 0;
  for (const auto& x : {in.query, in.key, in.index_query, in.index_key, in.index_weights}) {
    bytes += 2 * x.nbytes();  // and its gradient
  }
  return bytes + 2 * in.d_out.nbytes() + s.S * s.K * 4;  // the output, its gradient, the indices
}

int run(const Shape& s, int repeats, ops::Kernel kernel) {
  const double peak = longhaul_kernels_peak_flops(LONGHAUL_BFLOAT16, /*seconds=*/0.5);
  const int64_t before = peak_memory_bytes();
  const Inputs in = make_inputs(s);
  Times times;
  run_once(s, in, kernel, times);  // warm-up
  times = {};
  for (int i = 0; i < repeats; ++i) run_once(s, in, kernel, times);
  const Flops flops = count_flops(s);
  fmt::print(
      "{{\"isa\": \"{}\", \"peak_flops\": {}, \"io_bytes\": {}, \"memory_bytes\": {}, "
      "\"select\": {}, \"attend\": {}, \"backward\": {}, \"select_flops\": {}, \"attend_flops\": "
      "{}, \"backward_flops\": {}}}\n",
      longhaul_kernels_isa(), peak, bytes_of(s, in), peak_memory_bytes() - before,
      median(times.select), median(times.attend), median(times.backward), flops.select,
      flops.attend, flops.backward);
  return 0;
}

}  // namespace
}  // namespace longhaul

int main(int argc, char** argv) {
  if (argc != 10) {
    fmt::print(stderr, "usage: bench_dsa S H C R Hi Di K REPEATS fused|eager\n");
    return 2;
  }
  const auto number = [&](int i) { return std::stoll(argv[i]); };
  const longhaul::Shape shape{number(1), number(2), number(3), number(4),
                              number(5), number(6), number(7)};
  const auto kernel = std::string(argv[9]) == "fused" ? longhaul::ops::Kernel::kFused
                                                      : longhaul::ops::Kernel::kReference;
  return longhaul::run(shape, static_cast<int>(number(8)), kernel);
}
