// The C functions of the kernels that go through rows and elements, as fused_memory_test.cpp has
// those of attention.
#include <numeric>

#include "tests/ops/fused_memory.h"

namespace longhaul::testing {
namespace {

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
    const void* grad = arrays.numbers(s.dtype, n);
    auto* exp_avg_sq = static_cast<char*>(arrays.replaced(s.dtype, n));
    const int64_t size = s.dtype == LONGHAUL_FLOAT32 ? 4 : 2;
    for (int64_t i = 1; i <= n; ++i) exp_avg_sq[i * size - 1] &= 0x7f;  // the sign
    parameters.push_back({.dtype = s.dtype,
                          .n = n,
                          .step = s.S,
                          .weight_decay = 0.1,
                          .param = arrays.replaced(s.dtype, n),
                          .grad = grad,
                          .exp_avg = arrays.replaced(s.dtype, n),
                          .exp_avg_sq = exp_avg_sq});
    gradients.push_back({.dtype = s.dtype, .n = n, .data = grad});
    gradients.push_back({LONGHAUL_FLOAT32, n, arrays.floats(n)});
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

// Groups of any size, empty ones too, and rows that none has.
void run_grouped_matmul(const Shape& s, Arrays& arrays) {
  const int64_t N = s.H, K = s.K + s.L;
  std::vector<int64_t> counts;
  int64_t M = s.S % 7;
  for (int64_t e = 0; e < s.B * 3; ++e) {
    counts.push_back(arrays.random()() % 3 == 0 ? 0 : s.L * (e + 1) / 2);
    M += counts.back();
  }
  const auto E = static_cast<int64_t>(counts.size());
  const void* weight = arrays.numbers(s.dtype, E * N * K);
  const void *x = arrays.numbers(s.dtype, M * K), *dy = arrays.numbers(s.dtype, M * N);
  for (const int transposed : {0, 1}) {
    arrays.run(
        longhaul_grouped_matmul, longhaul_grouped_matmul_workspace,
        longhaul_grouped_matmul_args{.dtype = s.dtype,
                                     .transposed = transposed,
                                     .M = M,
                                     .N = N,
                                     .K = K,
                                     .E = E,
                                     .counts = counts.data(),
                                     .in = transposed ? dy : x,
                                     .weight = weight,
                                     .out = arrays.result(s.dtype, M * (transposed ? K : N))});
  }
  arrays.run(longhaul_grouped_matmul_grad, longhaul_grouped_matmul_grad_workspace,
             longhaul_grouped_matmul_grad_args{.dtype = s.dtype,
                                               .M = M,
                                               .N = N,
                                               .K = K,
                                               .E = E,
                                               .counts = counts.data(),
                                               .dy = dy,
                                               .x = x,
                                               .d_weight = arrays.result(s.dtype, E * N * K)});
}

// Heads and tokens at distances of their own.
void run_rotary_mul(const Shape& s, Arrays& arrays) {
  const int64_t T = s.B * s.S, R = 2 * s.K;
  longhaul_rotary_mul_args a = {};
  a.dtype = s.dtype;
  a.interleaved = arrays.random()() % 2 != 0;
  a.backward = arrays.random()() % 2 != 0;
  a.T = T;
  a.H = s.H;
  a.R = R;
  a.head_stride = R + s.L % 5;
  a.token_stride = s.H * a.head_stride + s.L % 3;
  a.x = arrays.numbers(s.dtype, (T - 1) * a.token_stride + (s.H - 1) * a.head_stride + R);
  a.cos = arrays.floats(T * R / 2);
  a.sin = arrays.floats(T * R / 2);
  a.out = arrays.result(s.dtype, T * s.H * R);
  EXPECT_STREQ(longhaul_rotary_mul(&a), nullptr);
}

void run_swiglu(const Shape& s, Arrays& arrays) {
  const int64_t rows = s.B * s.S, D = s.L, gate_stride = D + s.K, up_stride = D + s.H;
  longhaul_swiglu_args a = {};
  a.dtype = s.dtype;
  a.rows = rows;
  a.D = D;
  a.gate_stride = gate_stride;
  a.up_stride = up_stride;
  a.gate = arrays.numbers(s.dtype, (rows - 1) * gate_stride + D, -20, 20);
  a.up = arrays.numbers(s.dtype, (rows - 1) * up_stride + D);
  a.y = arrays.result(s.dtype, rows * D);
  EXPECT_STREQ(longhaul_swiglu(&a), nullptr);
  longhaul_swiglu_grad_args g = {};
  g.dtype = s.dtype;
  g.rows = rows;
  g.D = D;
  g.dy_stride = up_stride;
  g.gate_stride = gate_stride;
  g.up_stride = up_stride;
  g.d_stride = D;
  g.dy = arrays.numbers(s.dtype, (rows - 1) * up_stride + D);
  g.gate = a.gate;
  g.up = a.up;
  g.d_gate = arrays.result(s.dtype, rows * D);
  g.d_up = arrays.result(s.dtype, rows * D);
  EXPECT_STREQ(longhaul_swiglu_grad(&g), nullptr);
}

// Rows in any order; with and without weights, and with the gradient of these.
void run_permute(const Shape& s, Arrays& arrays) {
  const int64_t T = s.B * s.S, k = 1 + s.H % 9, D = s.L;
  std::vector<int64_t> inverse(static_cast<size_t>(T * k));
  std::iota(inverse.begin(), inverse.end(), 0);
  std::shuffle(inverse.begin(), inverse.end(), arrays.random());
  const bool weighted = arrays.random()() % 2 != 0, graded = arrays.random()() % 2 != 0;
  longhaul_moe_token_permute_args a = {};
  a.dtype = s.dtype;
  a.T = T;
  a.k = k;
  a.D = D;
  a.tokens = arrays.numbers(s.dtype, T * D);
  a.inverse = inverse.data();
  a.probs = weighted ? arrays.floats(T * k) : nullptr;
  a.permuted = arrays.result(s.dtype, T * k * D);
  a.rows = graded ? arrays.numbers(s.dtype, T * k * D) : nullptr;
  a.d_probs = graded ? arrays.result_floats(T * k) : nullptr;
  EXPECT_STREQ(longhaul_moe_token_permute(&a), nullptr);
  longhaul_moe_token_unpermute_args u = {};
  u.dtype = s.dtype;
  u.T = T;
  u.k = k;
  u.D = D;
  u.permuted = a.permuted;
  u.inverse = inverse.data();
  u.probs = a.probs;
  u.tokens = arrays.result(s.dtype, T * D);
  EXPECT_STREQ(longhaul_moe_token_unpermute(&u), nullptr);
}

class FusedRowMemory : public FusedKernels<RunFunction> {};

TEST_P(FusedRowMemory, RandomShapes) { run_at_random_shapes(GetParam()); }

INSTANTIATE_TEST_SUITE_P(Kernels, FusedRowMemory,
                         ::testing::Values(run_cross_entropy, run_rms_norm, run_gating, run_adam_w,
                                           run_grouped_matmul, run_rotary_mul, run_swiglu,
                                           run_permute));

}  // namespace
}  // namespace longhaul::testing
