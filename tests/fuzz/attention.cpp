// The indexer, its losses and attention.
#include "tests/fuzz/operators.h"

namespace longhaul::fuzz {

namespace {

// The dtype, and how many rows, queries, keys and heads.
template <typename Args>
void common_sizes(Case& c, Args& a) {
  c.dtype(a.dtype);
  if constexpr (requires { a.B; }) {
    a.B = c.batch();
    a.S = c.queries();
  } else {  // a block of queries of one row
    a.S = c.size(0, c.rarely() ? 128 : 40, {-1, 129, Case::kLowest, Case::kHighest});
  }
  a.L = c.keys();
  a.H = c.heads();
}

// The same of an indexer's loss or gradient, with its operands.
template <typename Args>
void indexer_operands(Case& c, Args& a) {
  common_sizes(c, a);
  a.D = c.columns();
  int64_t queries = a.S, rows = 1;
  if constexpr (requires { a.K; }) {
    a.K = c.chosen_keys();
    rows = a.B;
    queries *= rows;
  }
  a.query = c.typed(queries * a.H * a.D);
  a.key = c.typed(rows * a.L * a.D);
  a.weights = c.floats(queries * a.H);
  if constexpr (requires { a.indices; }) {
    a.indices = c.indices(queries, a.K, a.L);
  } else {
    c.ranges(a.S, std::max<int64_t>(a.S, 1), a.L, a.first_key, a.last_key);
  }
}

float any_scale(Case& c) { return static_cast<float>(c.number(-1, 4)) * 0.25F; }

// One for all heads, or one for each.
int64_t key_heads(Case& c, int64_t H) { return c.flip() ? 1 : c.size(H, H, {0, -1, H + 1}); }

// What an attention writes.
template <typename Args>
void attention_results(Case& c, Args& a) {
  const int64_t rows = a.B * a.S * a.H;
  a.out = c.result(rows * a.V);
  a.softmax_max = c.result_floats(rows);
  a.softmax_sum = c.result_floats(rows);
  if constexpr (requires { a.head_sum; }) {
    a.head_sum = c.flip() ? c.result_floats(a.B * a.S * a.K) : nullptr;
  }
}

// What its gradient reads and writes; `key_rows` rows of keys and, with `has_value`, of values.
template <typename Grad>
void attention_gradients(Case& c, Grad& g, int64_t key_rows, bool has_value) {
  const auto& a = g.forward;
  const int64_t rows = a.B * a.S * a.H;
  g.d_out = c.typed(rows * a.V);
  g.d_query = c.result(rows * a.D);
  g.d_key = c.result(key_rows * a.D);
  if constexpr (requires { g.d_value; }) {
    g.d_value = has_value ? c.result(key_rows * a.V) : nullptr;
  }
}

template <typename Grad>
void expect_attention(Case& c, const Grad& g, int64_t key_rows) {
  if (!c.is_tame()) return;
  const auto& a = g.forward;
  const int64_t rows = a.B * a.S * a.H;
  c.expect_numbers(a.out, rows * a.V, "out");
  c.expect_numbers(a.softmax_max, rows, "softmax_max");
  c.expect_numbers(a.softmax_sum, rows, "softmax_sum");
  if constexpr (requires { a.head_sum; }) {
    if (a.head_sum) c.expect_numbers(a.head_sum, a.B * a.S * a.K, "head_sum");
  }
  c.expect_numbers(g.d_query, rows * a.D, "d_query");
  c.expect_numbers(g.d_key, key_rows * a.D, "d_key");
  if constexpr (requires { g.d_value; }) {
    if (g.d_value) c.expect_numbers(g.d_value, key_rows * a.V, "d_value");
  }
}

// The chosen are as many as a query sees, up to K, in ascending order; the tail is -1 and 0.
void check_selection(const longhaul_lightning_indexer_args& a) {
  for (int64_t row = 0; row < a.B * a.S; ++row) {
    const int64_t first = a.first_key[row], last = a.last_key[row];
    const int64_t count = first > last ? 0 : std::min(a.K, last - first + 1);
    int64_t before = first - 1;
    for (int64_t i = 0; i < a.K; ++i) {
      const int64_t key = a.indices[row * a.K + i];
      if (i >= count) {
        if (key != -1 || a.scores[row * a.K + i] != 0) fail("an index behind the last one");
        continue;
      }
      if (key <= before || key > last) fail("an index out of range or order, or too few of them");
      before = key;
    }
  }
}

}  // namespace

void lightning_indexer(Case& c) {
  longhaul_lightning_indexer_args a = {};
  c.dtype(a.dtype);
  a.B = c.batch();
  a.S = c.queries();
  a.L = c.rarely() ? c.number(600, 1300) : c.keys();
  a.H = c.heads();
  a.D = c.size(1, 40, {0, -1, Case::kLowest});
  a.K = c.chosen_keys();
  if (c.is_bf16()) c.must_be(a.D % 2 == 0);
  a.query = c.typed(a.B * a.S * a.H * a.D);
  a.key = c.typed(a.B * a.L * a.D);
  a.weights = c.floats(a.B * a.S * a.H);
  c.ranges(a.B * a.S, a.S, a.L, a.first_key, a.last_key);
  a.indices = c.result_indices(a.B * a.S * a.K);
  a.scores = c.result_floats(a.B * a.S * a.K);
  if (!c.run(longhaul_lightning_indexer, longhaul_lightning_indexer_workspace, a)) return;
  check_selection(a);
  if (c.is_tame()) c.expect_numbers(a.scores, a.B * a.S * a.K, "scores");
}

void lightning_indexer_grad(Case& c) {
  longhaul_lightning_indexer_grad_args a = {};
  indexer_operands(c, a);
  const int64_t queries = a.B * a.S;
  a.d_scores = c.floats(queries * a.K);
  a.d_query = c.result(queries * a.H * a.D);
  a.d_key = c.result(a.B * a.L * a.D);
  a.d_weights = c.result_floats(queries * a.H);
  if (!c.run(longhaul_lightning_indexer_grad, longhaul_lightning_indexer_grad_workspace, a)) return;
  if (!c.is_tame()) return;
  c.expect_numbers(a.d_query, queries * a.H * a.D, "d_query");
  c.expect_numbers(a.d_key, a.B * a.L * a.D, "d_key");
  c.expect_numbers(a.d_weights, queries * a.H, "d_weights");
}

namespace {

// head_sum alone, by the kernel for these arguments.
template <typename Args, typename Kernel, typename Workspace>
void head_sum_again(Case& c, Args a, Kernel kernel, Workspace workspace) {
  const int64_t count = a.B * a.S * a.K;
  a.head_sum = c.result_floats(count);
  if (c.rarely()) {
    c.must_be(false);
    a.head_sum = nullptr;
  }
  if (!c.run(kernel, workspace, a)) return;
  if (c.is_tame()) c.expect_numbers(a.head_sum, count, "the head sum made again");
}

}  // namespace

void sparse_attention(Case& c) {
  longhaul_sparse_attention_grad_args g = {};
  auto& a = g.forward;
  common_sizes(c, a);
  a.V = c.columns();
  a.D = a.V + 32 * c.size(0, 2, {-1});
  a.K = c.chosen_keys();
  a.scale = any_scale(c);
  const int64_t keys = a.B * a.L;
  a.query = c.typed(a.B * a.S * a.H * a.D);
  a.key = c.typed(keys * a.D);
  a.indices = c.indices(a.B * a.S, a.K, a.L);
  attention_results(c, a);
  if (!c.run(longhaul_sparse_attention, longhaul_sparse_attention_workspace, a)) return;
  attention_gradients(c, g, keys, /*has_value=*/false);
  c.run(longhaul_sparse_attention_grad, longhaul_sparse_attention_grad_workspace, g);
  head_sum_again(c, a, longhaul_sparse_attention_head_sum,
                 longhaul_sparse_attention_head_sum_workspace);
  expect_attention(c, g, keys);
}

void sparse_attention_expanded(Case& c) {
  longhaul_sparse_attention_expanded_grad_args g = {};
  auto& a = g.forward;
  common_sizes(c, a);
  a.D = c.columns();
  a.V = c.columns();
  a.K = c.chosen_keys();
  a.key_stride = a.D + c.size(0, 3, {-1, Case::kLowest});
  a.value_stride = a.V + c.size(0, 3, {-1, Case::kLowest});
  a.scale = any_scale(c);
  const int64_t key_rows = a.B * a.L * a.H;
  a.query = c.typed(a.B * a.S * a.H * a.D);
  a.key = c.typed(key_rows == 0 ? 0 : (key_rows - 1) * a.key_stride + a.D);
  a.value = c.typed(key_rows == 0 ? 0 : (key_rows - 1) * a.value_stride + a.V);
  a.indices = c.indices(a.B * a.S, a.K, a.L);
  attention_results(c, a);
  if (!c.run(longhaul_sparse_attention_expanded, longhaul_sparse_attention_expanded_workspace, a)) {
    return;
  }
  attention_gradients(c, g, key_rows, /*has_value=*/true);
  c.run(longhaul_sparse_attention_expanded_grad, longhaul_sparse_attention_expanded_grad_workspace,
        g);
  head_sum_again(c, a, longhaul_sparse_attention_expanded_head_sum,
                 longhaul_sparse_attention_expanded_head_sum_workspace);
  expect_attention(c, g, key_rows);
}

void flash_attention(Case& c) {
  longhaul_flash_attention_grad_args g = {};
  auto& a = g.forward;
  common_sizes(c, a);
  a.D = c.columns();
  const bool has_value = c.flip();
  a.V = has_value ? c.columns() : a.D - 32 * c.number(0, 2);
  c.must_be(a.V > 0);
  a.key_heads = key_heads(c, a.H);
  a.scale = any_scale(c);
  const int64_t key_rows = a.B * a.key_heads * a.L;
  a.query = c.typed(a.B * a.S * a.H * a.D);
  a.key = c.typed(key_rows * a.D);
  a.value = has_value ? c.typed(key_rows * a.V) : nullptr;
  c.ranges(a.B * a.S, a.S, a.L, a.first_key, a.last_key);
  attention_results(c, a);
  if (!c.run(longhaul_flash_attention, longhaul_flash_attention_workspace, a)) return;
  const bool wrong = c.rarely();
  c.must_be(!wrong);
  attention_gradients(c, g, key_rows, has_value != wrong);
  if (!c.run(longhaul_flash_attention_grad, longhaul_flash_attention_grad_workspace, g)) return;
  expect_attention(c, g, key_rows);
}

namespace {

// Gradients of the indexer's losses: all three, none, or wrongly some.
template <typename Args, typename DKey>
void indexer_gradients(Case& c, Args& a, int64_t queries, const DKey& d_key) {
  if (!c.flip()) return;
  const bool wrong = c.rarely();
  c.must_be(!wrong);
  a.d_query = c.result(queries * a.H * a.D);
  a.d_key = d_key();
  a.d_weights = wrong ? nullptr : c.result_floats(queries * a.H);
}

}  // namespace

void indexer_kl_loss(Case& c) {
  longhaul_indexer_kl_loss_args a = {};
  indexer_operands(c, a);
  const int64_t queries = a.B * a.S;
  a.scores = c.flip() ? c.floats(queries * a.K) : nullptr;
  a.head_sum = c.floats(queries * a.K, 0);
  a.loss = c.result_floats(queries);
  indexer_gradients(c, a, queries, [&] { return c.result(a.B * a.L * a.D); });
  if (!c.run(longhaul_indexer_kl_loss, longhaul_indexer_kl_loss_workspace, a)) return;
  if (!c.is_tame()) return;
  c.expect_numbers(a.loss, queries, "loss");
  if (!a.d_query) return;
  c.expect_numbers(a.d_query, queries * a.H * a.D, "d_query");
  c.expect_numbers(a.d_key, a.B * a.L * a.D, "d_key");
  c.expect_numbers(a.d_weights, queries * a.H, "d_weights");
}

namespace {

void check_head_sum(const longhaul_attention_head_sum_args& a) {
  const int64_t Q = (a.S + 31) / 32 * 32;
  for (int64_t key = 0; key < a.L; ++key) {
    for (int64_t q = 0; q < Q; ++q) {
      const bool sees = q < a.S && a.first_key[q] <= key && key <= a.last_key[q];
      if (!sees && a.head_sum[key * Q + q] != 0) fail("a head sum where no key is seen");
    }
  }
}

}  // namespace

void attention_head_sum(Case& c) {
  longhaul_attention_head_sum_args a = {};
  common_sizes(c, a);
  a.D = c.columns();
  a.key_heads = key_heads(c, a.H);
  a.key_head_stride = a.L * a.D + c.number(0, 3);
  a.scale = any_scale(c);
  const int64_t Q = (a.S + 31) / 32 * 32;
  a.query = c.typed(a.S * a.H * a.D);
  a.key = c.typed(a.L == 0 ? 0 : (a.key_heads - 1) * a.key_head_stride + a.L * a.D);
  a.softmax_max = c.floats(a.S * a.H);
  a.softmax_sum = c.floats(a.S * a.H, 0);
  c.ranges(a.S, std::max<int64_t>(a.S, 1), a.L, a.first_key, a.last_key);
  a.head_sum = c.result_floats(a.L * Q);
  if (!c.run(longhaul_attention_head_sum, longhaul_attention_head_sum_workspace, a)) return;
  if (c.is_finite()) check_head_sum(a);
}

void dense_indexer_kl_loss(Case& c) {
  longhaul_dense_indexer_kl_loss_args a = {};
  indexer_operands(c, a);
  const int64_t Q = (a.S + 31) / 32 * 32;
  float* head_sum = c.floats(a.L * Q, 0);
  for (int64_t i = 0; c.is_valid() && i < a.L * Q; ++i) {
    const int64_t key = i / Q, q = i % Q;
    const bool sees = q < a.S && a.first_key[q] <= key && key <= a.last_key[q];
    if (!sees) head_sum[i] = 0;
  }
  a.head_sum = head_sum;
  if (c.flip()) {
    auto softmax = a;
    softmax.head_sum = nullptr;
    softmax.softmax_max = a.softmax_max = c.result_floats(a.S);
    softmax.softmax_sum = c.result_floats(a.S);
    a.softmax_sum = c.rarely() ? nullptr : softmax.softmax_sum;
    if (!c.run(longhaul_dense_indexer_softmax, longhaul_dense_indexer_softmax_workspace, softmax)) {
      return;
    }
    c.must_be(a.softmax_sum != nullptr);
  }
  a.loss = c.result_floats(a.S);
  indexer_gradients(c, a, a.S, [&] { return c.keep(c.floats(a.L * a.D)); });
  if (!c.run(longhaul_dense_indexer_kl_loss, longhaul_dense_indexer_kl_loss_workspace, a)) return;
  if (!c.is_tame()) return;
  c.expect_numbers(a.loss, a.S, "loss");
  if (!a.d_query) return;
  c.expect_numbers(a.d_query, a.S * a.H * a.D, "d_query");
  c.expect_numbers(a.d_key, a.L * a.D, "d_key");
  c.expect_numbers(a.d_weights, a.S * a.H, "d_weights");
}

}  // namespace longhaul::fuzz
