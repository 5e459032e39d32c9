// The C functions of the kernels over random shapes and indices, each array and the workspace of
// exactly the size that kernels.h states and at an address that only 4 divides: what
// AddressSanitizer needs to see an access outside. Each result is written in full, and is the same
// wherever the arrays lie and on any number of threads.
#include "tests/ops/fused_memory.h"

namespace longhaul::testing {
namespace {

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
  auto sum = a;
  sum.head_sum = arrays.result_floats(rows * s.K);
  arrays.run(longhaul_sparse_attention_head_sum, longhaul_sparse_attention_head_sum_workspace, sum);
  arrays.run(longhaul_sparse_attention_grad, longhaul_sparse_attention_grad_workspace, args);
}

// Rows of keys and values apart by a few elements or none; values may be wider than keys.
void run_expanded_attention(const Shape& s, Arrays& arrays) {
  const int64_t rows = s.B * s.S, keys = s.B * s.L * s.H;
  const int64_t D = arrays.random()() % 2 ? s.D : s.V, V = D == s.D ? s.V : s.D;
  const int64_t key_stride = D + 2 * static_cast<int64_t>(arrays.random()() % 3);
  const int64_t value_stride = V + 2 * static_cast<int64_t>(arrays.random()() % 3);
  longhaul_sparse_attention_expanded_grad_args args = {};
  auto& a = args.forward;
  a = {.dtype = s.dtype,
       .B = s.B,
       .S = s.S,
       .L = s.L,
       .H = s.H,
       .D = D,
       .V = V,
       .K = s.K,
       .key_stride = key_stride,
       .value_stride = value_stride,
       .scale = 0.2F,
       .query = arrays.numbers(s.dtype, rows * s.H * D),
       .key = arrays.numbers(s.dtype, (keys - 1) * key_stride + D),
       .value = arrays.numbers(s.dtype, (keys - 1) * value_stride + V),
       .indices = arrays.indices(rows, s.K, s.L),
       .out = arrays.result(s.dtype, rows * s.H * V),
       .softmax_max = arrays.result_floats(rows * s.H),
       .softmax_sum = arrays.result_floats(rows * s.H),
       .head_sum = arrays.random()() % 2 ? arrays.result_floats(rows * s.K) : nullptr};
  args.d_out = arrays.numbers(s.dtype, rows * s.H * V);
  args.d_query = arrays.result(s.dtype, rows * s.H * D);
  args.d_key = arrays.result(s.dtype, keys * D);
  args.d_value = arrays.result(s.dtype, keys * V);
  arrays.run(longhaul_sparse_attention_expanded, longhaul_sparse_attention_expanded_workspace, a);
  auto sum = a;
  sum.head_sum = arrays.result_floats(rows * s.K);
  arrays.run(longhaul_sparse_attention_expanded_head_sum,
             longhaul_sparse_attention_expanded_head_sum_workspace, sum);
  arrays.run(longhaul_sparse_attention_expanded_grad,
             longhaul_sparse_attention_expanded_grad_workspace, args);
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

void run_indexer_grad(const Shape& s, Arrays& arrays) {
  const int64_t rows = s.B * s.S;
  const longhaul_lightning_indexer_grad_args a = {
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
      .d_scores = arrays.floats(rows * s.K),
      .d_query = arrays.result(s.dtype, rows * s.H * s.D),
      .d_key = arrays.result(s.dtype, s.B * s.L * s.D),
      .d_weights = arrays.result_floats(rows * s.H)};
  arrays.run(longhaul_lightning_indexer_grad, longhaul_lightning_indexer_grad_workspace, a);
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
  const int64_t stride = s.L * s.D + static_cast<int64_t>(arrays.random()() % 4);
  const Visible visible(S, s.L, arrays.random());
  const longhaul_attention_head_sum_args sum = {.dtype = s.dtype,
                                                .S = S,
                                                .L = s.L,
                                                .H = s.H,
                                                .D = s.D,
                                                .key_heads = heads,
                                                .key_head_stride = stride,
                                                .scale = 0.2F,
                                                .query = arrays.numbers(s.dtype, S * s.H * s.D),
                                                .key = arrays.numbers(s.dtype, heads * stride),
                                                .softmax_max = arrays.floats(S * s.H, 2, 3),
                                                .softmax_sum = arrays.floats(S * s.H, 1, 9),
                                                .first_key = visible.first.data(),
                                                .last_key = visible.last.data(),
                                                .head_sum = arrays.result_floats(s.L * Q)};
  arrays.run(longhaul_attention_head_sum, longhaul_attention_head_sum_workspace, sum);
  float* d_key = gradients ? arrays.result_floats(s.L * s.V) : nullptr;
  if (d_key) std::fill_n(d_key, s.L * s.V, 1.0F);  // it is added to
  longhaul_dense_indexer_kl_loss_args softmax = {.dtype = s.dtype,
                                                 .S = S,
                                                 .L = s.L,
                                                 .H = s.H,
                                                 .D = s.V,
                                                 .query = arrays.numbers(s.dtype, S * s.H * s.V),
                                                 .key = arrays.numbers(s.dtype, s.L * s.V),
                                                 .weights = arrays.floats(S * s.H),
                                                 .first_key = visible.first.data(),
                                                 .last_key = visible.last.data(),
                                                 .head_sum = nullptr,
                                                 .softmax_max = arrays.result_floats(S),
                                                 .softmax_sum = arrays.result_floats(S),
                                                 .loss = nullptr,
                                                 .d_query = nullptr,
                                                 .d_key = nullptr,
                                                 .d_weights = nullptr};
  arrays.run(longhaul_dense_indexer_softmax, longhaul_dense_indexer_softmax_workspace, softmax);
  longhaul_dense_indexer_kl_loss_args loss = softmax;
  if (arrays.random()() % 2) loss.softmax_max = loss.softmax_sum = nullptr;
  loss.head_sum = sum.head_sum;
  loss.loss = arrays.result_floats(S);
  loss.d_query = gradients ? arrays.result(s.dtype, S * s.H * s.V) : nullptr;
  loss.d_key = d_key;
  loss.d_weights = gradients ? arrays.result_floats(S * s.H) : nullptr;
  arrays.run(longhaul_dense_indexer_kl_loss, longhaul_dense_indexer_kl_loss_workspace, loss);
}

class FusedMemory : public FusedKernels<RunFunction> {};

TEST_P(FusedMemory, RandomShapesAndIndices) { run_at_random_shapes(GetParam()); }

INSTANTIATE_TEST_SUITE_P(Kernels, FusedMemory,
                         ::testing::Values(run_attention, run_expanded_attention, run_loss,
                                           run_indexer, run_indexer_grad, run_dense_attention,
                                           run_dense_loss));

}  // namespace
}  // namespace longhaul::testing
