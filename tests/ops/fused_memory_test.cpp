// The C functions of the kernels over random shapes and indices, each array and the workspace of
// exactly the size that kernels.h states and at an address that only 4 divides: what
// AddressSanitizer needs to see an access outside. Each result is written in full, and is the same
// wherever the arrays lie and on any number of threads.
#include <gtest/gtest.h>
#include <omp.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "include/longhaul/kernels.h"
#include "tests/ops/fused_kernels.h"

namespace longhaul::testing {
namespace {

// An array on the heap without a byte to spare behind it; `offset` bytes lie unused before it.
class Block {
 public:
  Block(size_t bytes, size_t offset) : offset_(offset), memory_(new char[offset + bytes]) {
    // Other bytes for each offset, so that what stays unwritten makes the results differ.
    std::memset(data(), offset == 0 ? 0 : 0xff, bytes);
  }
  char* data() const { return memory_.get() + offset_; }

 private:
  size_t offset_;
  std::unique_ptr<char[]> memory_;
};

struct Shape {
  longhaul_dtype dtype;
  int64_t B, S, L, H, D, V, K;
};

// Arrays that one run reads and writes, in the order in which they were made.
class Arrays {
 public:
  Arrays(uint64_t seed, size_t offset) : random_(seed), offset_(offset) {}

  void* numbers(longhaul_dtype dtype, int64_t count, float low = -1, float high = 1) {
    std::uniform_real_distribution<float> values(low, high);
    const size_t size = dtype == LONGHAUL_FLOAT32 ? 4 : 2;
    char* to = add(static_cast<size_t>(count) * size);
    for (int64_t i = 0; i < count; ++i) {
      const float x = values(random_);
      char bits[4];
      std::memcpy(bits, &x, 4);
      std::memcpy(to + i * static_cast<int64_t>(size), bits + 4 - size, size);
    }
    return to;
  }
  float* floats(int64_t count, float low = -1, float high = 1) {
    return static_cast<float*>(numbers(LONGHAUL_FLOAT32, count, low, high));
  }

  // Distinct keys in each row, -1 anywhere; now and then a row in no order or without a key.
  int32_t* indices(int64_t rows, int64_t K, int64_t L) {
    auto* out = reinterpret_cast<int32_t*>(add(static_cast<size_t>(rows * K) * 4));
    for (int64_t row = 0; row < rows; ++row, out += K) {
      const uint64_t kind = random_() % 4;
      std::vector<int32_t> keys;
      for (int32_t key = 0; key < L && kind != 0; ++key) keys.push_back(key);
      keys.resize(static_cast<size_t>(std::max(L, K)), -1);
      if (kind != 1) std::shuffle(keys.begin(), keys.end(), random_);
      if (kind == 2) std::sort(keys.begin(), keys.begin() + K);
      std::copy(keys.begin(), keys.begin() + K, out);
    }
    return out - rows * K;
  }

  void* result(longhaul_dtype dtype, int64_t count) {
    results_.push_back(blocks_.size());
    result_bytes_.push_back(static_cast<size_t>(count) * (dtype == LONGHAUL_FLOAT32 ? 4 : 2));
    return add(result_bytes_.back());
  }
  float* result_floats(int64_t count) {
    return static_cast<float*>(result(LONGHAUL_FLOAT32, count));
  }

  // Read and replaced.
  void* replaced(longhaul_dtype dtype, int64_t count) {
    results_.push_back(blocks_.size());
    result_bytes_.push_back(static_cast<size_t>(count) * (dtype == LONGHAUL_FLOAT32 ? 4 : 2));
    return numbers(dtype, count, -20, 20);
  }

  template <typename Args>
  void run(const char* (*kernel)(const Args*, void*), size_t (*workspace)(const Args*),
           const Args& args) {
    const Block memory(workspace(&args), offset_);
    EXPECT_STREQ(kernel(&args, memory.data()), nullptr);
  }

  // Every byte of the results, one after the other.
  std::string results() const {
    std::string all;
    for (size_t i = 0; i < results_.size(); ++i) {
      all.append(blocks_[results_[i]].data(), result_bytes_[i]);
    }
    return all;
  }
  std::mt19937_64& random() { return random_; }

 private:
  char* add(size_t bytes) { return blocks_.emplace_back(bytes, offset_).data(); }

  std::mt19937_64 random_;
  size_t offset_;
  std::vector<Block> blocks_;
  std::vector<size_t> results_, result_bytes_;
};

Shape random_shape(uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto any = [&](int64_t low, int64_t high) {
    return low + static_cast<int64_t>(random() % static_cast<uint64_t>(high - low + 1));
  };
  Shape s = {};
  s.dtype = any(0, 1) == 0 ? LONGHAUL_FLOAT32 : LONGHAUL_BFLOAT16;
  s.B = any(1, 2);
  s.S = any(1, 50);
  s.L = any(0, 4) == 0 ? any(600, 1500) : any(1, 90);  // past the buffer of the top-k
  s.H = any(0, 3) == 0 ? any(1, 128) : any(1, 17);
  s.V = 32 * any(1, 3);
  s.D = s.V + 32 * any(0, 2);
  s.K = any(1, 70);
  return s;
}

void run_attention(const Shape& s, Arrays& arrays) {
  const int64_t rows = s.B * s.S;
  longhaul_sparse_attention_grad_args args = {};
  auto& a = args.forward;
  a = {.dtype = s.dtype,
       .B = s.B,
       .S = s.S,
       .L = s.L,
       .H = s.H,
       .D = s.D,
       .V = s.V,
       .K = s.K,
       .scale = 0.2F,
       .query = arrays.numbers(s.dtype, rows * s.H * s.D),
       .key = arrays.numbers(s.dtype, s.B * s.L * s.D),
       .indices = arrays.indices(rows, s.K, s.L),
       .out = arrays.result(s.dtype, rows * s.H * s.V),
       .softmax_max = arrays.result_floats(rows * s.H),
       .softmax_sum = arrays.result_floats(rows * s.H),
       .head_sum = arrays.random()() % 2 ? arrays.result_floats(rows * s.K) : nullptr};
  args.d_out = arrays.numbers(s.dtype, rows * s.H * s.V);
  args.d_query = arrays.result(s.dtype, rows * s.H * s.D);
  args.d_key = arrays.result(s.dtype, s.B * s.L * s.D);
  arrays.run(longhaul_sparse_attention, longhaul_sparse_attention_workspace, a);
  arrays.run(longhaul_sparse_attention_grad, longhaul_sparse_attention_grad_workspace, args);
}

// Each query sees some run of keys, or none.
struct Visible {
  std::vector<int64_t> first, last;

  Visible(int64_t rows, int64_t L, std::mt19937_64& random) {
    for (int64_t i = 0; i < rows; ++i) {
      first.push_back(static_cast<int64_t>(random() % static_cast<uint64_t>(L)));
      last.push_back(static_cast<int64_t>(random() % static_cast<uint64_t>(L)));
    }
  }
};

void run_dense_attention(const Shape& s, Arrays& arrays) {
  const int64_t rows = s.B * s.S;
  const bool by_head = arrays.random()() % 2, values = by_head || arrays.random()() % 2;
  const int64_t heads = by_head ? s.H : 1, keys = s.B * heads * s.L;
  const Visible visible(rows, s.L, arrays.random());
  longhaul_flash_attention_grad_args args = {};
  auto& a = args.forward;
  a = {.dtype = s.dtype,
       .B = s.B,
       .S = s.S,
       .L = s.L,
       .H = s.H,
       .D = s.D,
       .V = s.V,
       .key_heads = heads,
       .scale = 0.2F,
       .query = arrays.numbers(s.dtype, rows * s.H * s.D),
       .key = arrays.numbers(s.dtype, keys * s.D),
       .value = values ? arrays.numbers(s.dtype, keys * s.V) : nullptr,
       .first_key = visible.first.data(),
       .last_key = visible.last.data(),
       .out = arrays.result(s.dtype, rows * s.H * s.V),
       .softmax_max = arrays.result_floats(rows * s.H),
       .softmax_sum = arrays.result_floats(rows * s.H)};
  args.d_out = arrays.numbers(s.dtype, rows * s.H * s.V);
  args.d_query = arrays.result(s.dtype, rows * s.H * s.D);
  args.d_key = arrays.result(s.dtype, keys * s.D);
  args.d_value = values ? arrays.result(s.dtype, keys * s.V) : nullptr;
  arrays.run(longhaul_flash_attention, longhaul_flash_attention_workspace, a);
  arrays.run(longhaul_flash_attention_grad, longhaul_flash_attention_grad_workspace, args);
}

void run_loss(const Shape& s, Arrays& arrays) {
  const int64_t rows = s.B * s.S;
  const bool gradients = arrays.random()() % 4 != 0, scores = arrays.random()() % 2 != 0;
  longhaul_indexer_kl_loss_args a = {
      .dtype = s.dtype,
      .B = s.B,
      .S = s.S,
      .L = s.L,
      .H = s.H,
      .D = s.D,
      .K = s.K,
      .query = arrays.numbers(s.dtype, rows * s.H * s.D),
      .key = arrays.numbers(s.dtype, s.B * s.L * s.D),
      .weights = arrays.floats(rows * s.H),
      .indices = arrays.indices(rows, s.K, s.L),
      .scores = scores ? arrays.floats(rows * s.K) : nullptr,
      .head_sum = arrays.floats(rows * s.K, 0, 1),
      .loss = arrays.result_floats(rows),
      .d_query = gradients ? arrays.result(s.dtype, rows * s.H * s.D) : nullptr,
      .d_key = gradients ? arrays.result(s.dtype, s.B * s.L * s.D) : nullptr,
      .d_weights = gradients ? arrays.result_floats(rows * s.H) : nullptr};
  arrays.run(longhaul_indexer_kl_loss, longhaul_indexer_kl_loss_workspace, a);
}

// Any ranges of visible keys, also empty ones; D is even for bf16, else any number.
void run_indexer(const Shape& s, Arrays& arrays) {
  const int64_t rows = s.B * s.S, D = s.D - 30 + (s.dtype == LONGHAUL_FLOAT32 ? 1 : 0);
  std::vector<int64_t> first, last;
  for (int64_t i = 0; i < rows; ++i) {
    first.push_back(static_cast<int64_t>(arrays.random()() % static_cast<uint64_t>(s.L)));
    last.push_back(static_cast<int64_t>(arrays.random()() % static_cast<uint64_t>(s.L)));
  }
  void* indices = arrays.result(LONGHAUL_FLOAT32, rows * s.K);  // of the same size
  longhaul_lightning_indexer_args a = {.dtype = s.dtype,
                                       .B = s.B,
                                       .S = s.S,
                                       .L = s.L,
                                       .H = s.H,
                                       .D = D,
                                       .K = s.K,
                                       .query = arrays.numbers(s.dtype, rows * s.H * D),
                                       .key = arrays.numbers(s.dtype, s.B * s.L * D),
                                       .weights = arrays.floats(rows * s.H),
                                       .first_key = first.data(),
                                       .last_key = last.data(),
                                       .indices = static_cast<int32_t*>(indices),
                                       .scores = arrays.result_floats(rows * s.K)};
  arrays.run(longhaul_lightning_indexer, longhaul_lightning_indexer_workspace, a);
}

// A block of up to 128 queries.
void run_dense_loss(const Shape& s, Arrays& arrays) {
  const int64_t S = s.S * s.B, Q = (S + 31) / 32 * 32;
  const bool by_head = arrays.random()() % 2, gradients = arrays.random()() % 4 != 0;
  const int64_t heads = by_head ? s.H : 1;
  const Visible visible(S, s.L, arrays.random());
  const longhaul_attention_head_sum_args sum = {.dtype = s.dtype,
                                                .S = S,
                                                .L = s.L,
                                                .H = s.H,
                                                .D = s.D,
                                                .key_heads = heads,
                                                .key_head_stride = s.L * s.D,
                                                .scale = 0.2F,
                                                .query = arrays.numbers(s.dtype, S * s.H * s.D),
                                                .key = arrays.numbers(s.dtype, heads * s.L * s.D),
                                                .softmax_max = arrays.floats(S * s.H, 2, 3),
                                                .softmax_sum = arrays.floats(S * s.H, 1, 9),
                                                .first_key = visible.first.data(),
                                                .last_key = visible.last.data(),
                                                .head_sum = arrays.result_floats(s.L * Q)};
  arrays.run(longhaul_attention_head_sum, longhaul_attention_head_sum_workspace, sum);
  float* d_key = gradients ? arrays.result_floats(s.L * s.V) : nullptr;
  if (d_key) std::fill_n(d_key, s.L * s.V, 1.0F);  // it is added to
  const longhaul_dense_indexer_kl_loss_args loss = {
      .dtype = s.dtype,
      .S = S,
      .L = s.L,
      .H = s.H,
      .D = s.V,
      .query = arrays.numbers(s.dtype, S * s.H * s.V),
      .key = arrays.numbers(s.dtype, s.L * s.V),
      .weights = arrays.floats(S * s.H),
      .first_key = visible.first.data(),
      .last_key = visible.last.data(),
      .head_sum = sum.head_sum,
      .loss = arrays.result_floats(S),
      .d_query = gradients ? arrays.result(s.dtype, S * s.H * s.V) : nullptr,
      .d_key = d_key,
      .d_weights = gradients ? arrays.result_floats(S * s.H) : nullptr};
  arrays.run(longhaul_dense_indexer_kl_loss, longhaul_dense_indexer_kl_loss_workspace, loss);
}

// Rows at distances of their own; every third label is ignored.
void run_cross_entropy(const Shape& s, Arrays& arrays) {
  const int64_t rows = s.B * s.S, V = s.L, stride = V + s.K;
  std::vector<int64_t> labels;
  for (int64_t i = 0; i < rows; ++i) {
    const auto label = static_cast<int64_t>(arrays.random()() % static_cast<uint64_t>(V));
    labels.push_back(i % 3 == 2 ? -100 : label);
  }
  longhaul_cross_entropy_args a = {};
  a.dtype = s.dtype;
  a.gradient = arrays.random()() % 4 != 0;
  a.rows = rows;
  a.V = V;
  a.stride = stride;
  a.logits = arrays.replaced(s.dtype, (rows - 1) * stride + V);
  a.labels = labels.data();
  a.loss = arrays.result_floats(rows);
  EXPECT_STREQ(longhaul_cross_entropy(&a), nullptr);
}

// Any number of features, a residual and a gradient of the sum or none.
void run_rms_norm(const Shape& s, Arrays& arrays) {
  const int64_t rows = s.B * s.S, D = s.L, x_stride = D + s.K, residual_stride = D + s.H;
  const bool add = arrays.random()() % 2 != 0;
  longhaul_rms_norm_args a = {};
  a.dtype = s.dtype;
  a.rows = rows;
  a.D = D;
  a.x_stride = x_stride;
  a.residual_stride = residual_stride;
  a.eps = 1e-6F;
  a.x = arrays.numbers(s.dtype, (rows - 1) * x_stride + D);
  a.weight = arrays.numbers(s.dtype, D);
  a.residual = add ? arrays.numbers(s.dtype, (rows - 1) * residual_stride + D) : nullptr;
  a.y = arrays.result(s.dtype, rows * D);
  a.sum = add ? arrays.result(s.dtype, rows * D) : nullptr;
  a.rstd = arrays.result_floats(rows);
  EXPECT_STREQ(longhaul_rms_norm(&a), nullptr);
  longhaul_rms_norm_grad_args g = {};
  g.dtype = s.dtype;
  g.rows = rows;
  g.D = D;
  g.x_stride = add ? D : x_stride;
  g.dy_stride = g.d_sum_stride = x_stride;
  g.x = add ? a.sum : a.x;
  g.weight = a.weight;
  g.rstd = a.rstd;
  g.dy = arrays.numbers(s.dtype, (rows - 1) * x_stride + D);
  g.d_sum = add ? arrays.numbers(s.dtype, (rows - 1) * x_stride + D) : nullptr;
  g.d_x = arrays.result(s.dtype, rows * D);
  g.d_weight = arrays.result_floats(D);
  arrays.run(longhaul_rms_norm_grad, longhaul_rms_norm_grad_workspace, g);
}

// Groups of any size; with and without a bias, gradients of the scores or none.
void run_gating(const Shape& s, Arrays& arrays) {
  const int64_t T = s.B * s.S, n_group = s.H, E = n_group * (1 + s.K % 9);
  longhaul_moe_gating_top_k_grad_args g = {};
  auto& a = g.forward;
  a.T = T;
  a.E = E;
  a.k = 1 + s.L % E;
  a.n_group = n_group;
  a.topk_group = 1 + s.S % n_group;
  a.softmax = arrays.random()() % 2 != 0;
  a.normalize = arrays.random()() % 2 != 0;
  a.scale = 2.5F;
  a.logits = arrays.floats(T * E);
  a.bias = arrays.random()() % 2 ? arrays.floats(E) : nullptr;
  a.scores = arrays.result_floats(T * E);
  a.weights = arrays.result_floats(T * a.k);
  std::vector<int64_t> experts(static_cast<size_t>(T * a.k));
  a.experts = experts.data();
  arrays.run(longhaul_moe_gating_top_k, longhaul_moe_gating_top_k_workspace, a);
  g.d_weights = arrays.floats(T * a.k);
  g.d_scores = arrays.random()() % 2 ? arrays.floats(T * E) : nullptr;
  g.d_logits = arrays.result_floats(T * E);
  EXPECT_STREQ(longhaul_moe_gating_top_k_grad(&g), nullptr);
}

// Arrays of many sizes, none among them; one large enough for several threads.
void run_adam_w(const Shape& s, Arrays& arrays) {
  std::vector<longhaul_adam_w_parameter> parameters;
  std::vector<longhaul_array> gradients;
  for (const int64_t n : {s.K, int64_t{0}, s.L * s.H, s.H == 1 ? int64_t{70000} : int64_t{1}}) {
    float* grad = arrays.floats(n);
    auto* exp_avg_sq = static_cast<float*>(arrays.replaced(LONGHAUL_FLOAT32, n));
    for (int64_t i = 0; i < n; ++i) exp_avg_sq[i] = exp_avg_sq[i] * exp_avg_sq[i];
    parameters.push_back({.n = n,
                          .step = s.S,
                          .weight_decay = 0.1,
                          .param = static_cast<float*>(arrays.replaced(LONGHAUL_FLOAT32, n)),
                          .grad = grad,
                          .exp_avg = static_cast<float*>(arrays.replaced(LONGHAUL_FLOAT32, n)),
                          .exp_avg_sq = exp_avg_sq});
    gradients.push_back({.dtype = LONGHAUL_FLOAT32, .n = n, .data = grad});
    gradients.push_back({s.dtype, n, arrays.numbers(s.dtype, n)});
  }
  const longhaul_adam_w_args a = {.count = static_cast<int64_t>(parameters.size()),
                                  .parameters = parameters.data(),
                                  .lr = 1e-2,
                                  .beta1 = 0.9,
                                  .beta2 = 0.95,
                                  .eps = 1e-8,
                                  .grad_scale = 0.5};
  EXPECT_STREQ(longhaul_adam_w(&a), nullptr);
  double sum = 0;
  const longhaul_sum_of_squares_args squares = {
      .count = static_cast<int64_t>(gradients.size()), .arrays = gradients.data(), .sum = &sum};
  arrays.run(longhaul_sum_of_squares, longhaul_sum_of_squares_workspace, squares);
  std::memcpy(arrays.result_floats(2), &sum, sizeof sum);
}

using RunFunction = void (*)(const Shape&, Arrays&);

class FusedMemory : public FusedKernels<RunFunction> {};

TEST_P(FusedMemory, RandomShapesAndIndices) {
  const int before = omp_get_max_threads();
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    const Shape s = random_shape(seed);
    SCOPED_TRACE(::testing::Message() << "seed " << seed << ": H " << s.H << " D " << s.D << " V "
                                      << s.V << " K " << s.K << " S " << s.S << " L " << s.L);
    Arrays apart(seed, 4), aligned(seed, 0);
    omp_set_num_threads(3);
    GetParam()(s, apart);
    omp_set_num_threads(1);
    GetParam()(s, aligned);
    EXPECT_TRUE(apart.results() == aligned.results());
  }
  omp_set_num_threads(before);
}

INSTANTIATE_TEST_SUITE_P(Kernels, FusedMemory,
                         ::testing::Values(run_attention, run_loss, run_indexer,
                                           run_dense_attention, run_dense_loss, run_cross_entropy,
                                           run_rms_norm, run_gating, run_adam_w));

}  // namespace
}  // namespace longhaul::testing
