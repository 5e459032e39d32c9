// Times the core of DeepSeek Sparse Attention, stage by stage, at one shape in bf16, and prints one
// JSON object: seconds (medians), FLOPs, the peak of a loop on registers, bytes. bench/dsa.py calls
// it:
//   bench_dsa S H C R Hi Di K REPEATS fused|eager FORM
// eager: the reference operators, small ones of ATen in fp32 on the bf16 inputs. FORM: sparse and
// sparse_expanded, or absorbed and expanded: the dense warm-up instead, K is not used. The expanded
// ones have keys of C + R and values of C for each head.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <string>

#include "include/longhaul/kernels.h"
#include "longhaul/base/system.h"
#include "longhaul/ops/cpu_allocator.h"
#include "longhaul/ops/indexer_kl_loss/indexer_kl_loss.h"
#include "longhaul/ops/lightning_indexer/lightning_indexer.h"
#include "longhaul/ops/sparse_flash_attention/sparse_flash_attention.h"

namespace longhaul {
namespace {

using at::Tensor;
using Clock = std::chrono::steady_clock;

struct Shape {
  int64_t S, H, C, R, Hi, Di, K;
  std::string form;

  bool sparse() const { return form.starts_with("sparse"); }
  bool expanded() const { return form.ends_with("expanded"); }
};

struct Inputs {
  Tensor query, key, value, index_query, index_key, index_weights, doc_start, d_out;
};

Inputs make_inputs(const Shape& s) {
  at::manual_seed(1);
  // Drawn in place, so that nothing larger than the inputs is ever there.
  const auto normal = [](at::IntArrayRef sizes) {
    return at::empty(sizes, at::kBFloat16).normal_();
  };
  const int64_t D = s.C + s.R;
  return {.query = normal({1, s.S, s.H, D}),
          .key = s.expanded() ? normal({1, s.S, s.H, D}) : normal({1, s.S, D}),
          .value = s.expanded() ? normal({1, s.S, s.H, s.C}) : Tensor(),
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

double median(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  return x[x.size() / 2];
}

Tensor leaf(const Tensor& x) { return x.detach().set_requires_grad(true); }

ops::IndexerInputs index_leaves(const Inputs& in) {
  return {leaf(in.index_query), leaf(in.index_key), leaf(in.index_weights)};
}

// Query, key and, if expanded, value.
std::vector<Tensor> attention_leaves(const Inputs& in) {
  std::vector<Tensor> leaves = {leaf(in.query), leaf(in.key)};
  if (in.value.defined()) leaves.push_back(leaf(in.value));
  return leaves;
}

Tensor value_of(const std::vector<Tensor>& leaves) {
  return leaves.size() > 2 ? leaves[2] : Tensor();
}

void differentiate(const Tensor& loss, const ops::IndexerInputs& in) {
  torch::autograd::grad({loss}, {in.query_BSHD, in.key_BSD, in.weights_BSH});
}

ops::AttentionOptions options(const Shape& s, ops::Kernel kernel) {
  return {.scale = 1 / std::sqrt(double(s.C + s.R)), .value_dim = s.C, .kernel = kernel};
}

struct Stage {
  const char* name;
  double flops;  // multiplications and additions of the products
  std::vector<double> seconds = {};
};

// Selection; attention with the head sum; then the loss with its gradients and attention's
// backward.
void run_sparse(const Shape& s, const Inputs& in, ops::Kernel kernel, std::vector<Stage>& stages) {
  ops::IndexerSelection selection;
  stages[0].seconds.push_back(seconds_of([&] {
    selection = ops::lightning_indexer(in.index_query, in.index_key, in.index_weights, in.doc_start,
                                       s.K, kernel);
  }));
  const auto leaves = attention_leaves(in);
  const auto indexer = index_leaves(in);
  auto with_sum = options(s, kernel);
  with_sum.return_head_sum = true;
  ops::AttentionResult result;
  stages[1].seconds.push_back(seconds_of([&] {
    result = ops::sparse_flash_attention(leaves[0], leaves[1], value_of(leaves),
                                         selection.indices_BSK, with_sum);
  }));
  stages[2].seconds.push_back(seconds_of([&] {
    const Tensor loss = ops::sparse_indexer_kl_loss(indexer, selection.indices_BSK, result.head_sum,
                                                    kernel, selection.scores_BSK);
    torch::autograd::grad({result.out_BSHV}, leaves, {in.d_out});
    differentiate(loss, indexer);
  }));
}

// Attention; its backward; the loss of the warm-up with its gradients, which makes the head sum.
void run_dense(const Shape& s, const Inputs& in, ops::Kernel kernel, std::vector<Stage>& stages) {
  const auto leaves = attention_leaves(in);
  const auto indexer = index_leaves(in);
  auto with_statistics = options(s, kernel);
  with_statistics.return_statistics = true;
  ops::AttentionResult result;
  stages[0].seconds.push_back(seconds_of([&] {
    result =
        ops::flash_attention(leaves[0], leaves[1], value_of(leaves), in.doc_start, with_statistics);
  }));
  stages[1].seconds.push_back(
      seconds_of([&] { torch::autograd::grad({result.out_BSHV}, leaves, {in.d_out}); }));
  stages[2].seconds.push_back(seconds_of([&] {
    differentiate(ops::dense_indexer_kl_loss(indexer,
                                             {.query_BSHD = in.query,
                                              .key = in.key,
                                              .softmax_max = result.softmax_max,
                                              .softmax_sum = result.softmax_sum,
                                              .scale = with_statistics.scale},
                                             in.doc_start, {.kernel = kernel}),
                  indexer);
  }));
}

// Selected pairs are what the sequence has. The dense loss makes the attention's scores and the
// indexer's products again: both count, as the scores in attention's backward do.
std::vector<Stage> stages_of(const Shape& s) {
  const double pairs = 0.5 * double(s.S) * double(s.S + 1);
  const double D = double(s.C + s.R), V = double(s.C), H = double(s.H), I = double(s.Hi * s.Di);
  if (!s.sparse()) {
    return {{"attend", 2 * H * (D + V) * pairs},
            {"backward", 2 * H * (3 * D + 2 * V) * pairs},
            {"loss", 2 * (H * D + 4 * I) * pairs}};
  }
  const double full = double(std::min(s.K, s.S));
  const double selected = full * (full + 1) / 2 + (double(s.S) - full) * full;
  return {{"select", 2 * I * pairs},
          {"attend", 2 * H * (D + V) * selected},
          {"backward", 2 * (H * (3 * D + 2 * V) + 3 * I) * selected}};
}

int64_t bytes_of(const Shape& s, const Inputs& in) {
  int64_t bytes = 2 * in.d_out.nbytes() + (s.sparse() ? s.S * s.K * 4 : 0);  // output, indices
  for (const auto& x :
       {in.query, in.key, in.value, in.index_query, in.index_key, in.index_weights}) {
    if (x.defined()) bytes += 2 * x.nbytes();  // and its gradient
  }
  return bytes;
}

int run(const Shape& s, int repeats, ops::Kernel kernel) {
  const auto measure_peak = [] { return longhaul_kernels_peak_flops(LONGHAUL_BFLOAT16, 0.5); };
  double peak = measure_peak();
  const int64_t before = peak_memory_bytes();
  const Inputs in = make_inputs(s);
  auto stages = stages_of(s);
  for (int i = 0; i <= repeats; ++i) {
    s.sparse() ? run_sparse(s, in, kernel, stages) : run_dense(s, in, kernel, stages);
    if (i > 0) continue;
    for (auto& stage : stages) stage.seconds.clear();  // warm-up
  }
  peak = std::max(peak, measure_peak());  // other processes may have had a core the first time
  fmt::print("{{\"isa\": \"{}\", \"peak_flops\": {}, \"io_bytes\": {}, \"memory_bytes\": {}",
             longhaul_kernels_isa(), peak, bytes_of(s, in), peak_memory_bytes() - before);
  for (const auto& stage : stages) {
    fmt::print(", \"{0}\": {1}, \"{0}_flops\": {2}", stage.name, median(stage.seconds),
               stage.flops);
  }
  fmt::print("}}\n");
  return 0;
}

}  // namespace
}  // namespace longhaul

int main(int argc, char** argv) {
  if (argc != 11) {
    fmt::print(stderr,
               "usage: bench_dsa S H C R Hi Di K REPEATS fused|eager "
               "sparse|sparse_expanded|absorbed|expanded\n");
    return 2;
  }
  longhaul::ops::install_cpu_allocator();
  const auto number = [&](int i) { return std::stoll(argv[i]); };
  const longhaul::Shape shape{number(1), number(2), number(3), number(4),
                              number(5), number(6), number(7), argv[10]};
  const auto kernel = std::string(argv[9]) == "fused" ? longhaul::ops::Kernel::kFused
                                                      : longhaul::ops::Kernel::kReference;
  return longhaul::run(shape, static_cast<int>(number(8)), kernel);
}
