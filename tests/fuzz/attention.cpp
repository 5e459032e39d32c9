// The indexer, its losses and attention.
#include "tests/fuzz/operators.h"

namespace longhaul::fuzz {

namespace {

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
  c.dtype(a.dtype);
  a.B = c.batch();
  a.S = c.queries();
  a.L = c.keys();
  a.H = c.heads();
  a.D = c.columns();
  a.K = c.chosen_keys();
  const int64_t queries = a.B * a.S;
  a.query = c.typed(queries * a.H * a.D);
  a.key = c.typed(a.B * a.L * a.D);
  a.weights = c.floats(queries * a.H);
  a.indices = c.indices(queries, a.K, a.L);
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

void sparse_head_sum(Case& c, longhaul_sparse_attention_args a) {
  const int64_t count = a.B * a.S * a.K;
  a.head_sum = c.result_floats(count);
  if (c.rarely()) {
    c.must_be(false);
    a.head_sum = nullptr;
  }
  if (!c.run(longhaul_sparse_attention_head_sum, longhaul_sparse_attention_head_sum_workspace, a)) {
    return;
  }
  if (c.is_tame()) c.expect_numbers(a.head_sum, count, "the head sum made again");
}

}  // namespace

void sparse_attention(Case& c) {
  longhaul_sparse_attention_grad_args g = {};
  auto& a = g.forward;
  c.dtype(a.dtype);
  a.B = c.batch();
  a.S = c.queries();
  a.L = c.keys();
  a.H = c.heads();
  a.V = c.columns();
  a.D = a.V + 32 * c.size(0, 2, {-1});
  a.K = c.chosen_keys();
  a.scale = static_cast<float>(c.number(-1, 4)) * 0.25F;
  const int64_t queries = a.B * a.S, rows = queries * a.H;
  a.query = c.typed(rows * a.D);
  a.key = c.typed(a.B * a.L * a.D);
  a.indices = c.indices(queries, a.K, a.L);
  a.out = c.result(rows * a.V);
  a.softmax_max = c.result_floats(rows);
  a.softmax_sum = c.result_floats(rows);
  a.head_sum = c.flip() ? c.result_floats(queries * a.K) : nullptr;
  if (!c.run(longhaul_sparse_attention, longhaul_sparse_attention_workspace, a)) return;
  g.d_out = c.typed(rows * a.V);
  g.d_query = c.result(rows * a.D);
  g.d_key = c.result(a.B * a.L * a.D);
  c.run(longhaul_sparse_attention_grad, longhaul_sparse_attention_grad_workspace, g);
  sparse_head_sum(c, a);
  if (!c.is_tame()) return;
  c.expect_numbers(a.out, rows * a.V, "out");
  c.expect_numbers(a.softmax_max, rows, "softmax_max");
  c.expect_numbers(a.softmax_sum, rows, "softmax_sum");
  if (a.head_sum) c.expect_numbers(a.head_sum, queries * a.K, "head_sum");
  c.expect_numbers(g.d_query, rows * a.D, "d_query");
  c.expect_numbers(g.d_key, a.B * a.L * a.D, "d_key");
}

void sparse_attention_expanded(Case& c) {
  longhaul_sparse_attention_expanded_grad_args g = {};
  auto& a = g.forward;
  c.dtype(a.dtype);
  a.B = c.batch();
  a.S = c.queries();
  a.L = c.keys();
  a.H = c.heads();
  a.D = c.columns();
  a.V = c.columns();
  a.K = c.chosen_keys();
  a.key_stride = a.D + c.size(0, 3, {-1, Case::kLowest});
  a.value_stride = a.V + c.size(0, 3, {-1, Case::kLowest});
  a.scale = static_cast<float>(c.number(-1, 4)) * 0.25F;
  const int64_t queries = a.B * a.S, rows = queries * a.H, key_rows = a.B * a.L * a.H;
  a.query = c.typed(rows * a.D);
  a.key = c.typed(key_rows == 0 ? 0 : (key_rows - 1) * a.key_stride + a.D);
  a.value = c.typed(key_rows == 0 ? 0 : (key_rows - 1) * a.value_stride + a.V);
  a.indices = c.indices(queries, a.K, a.L);
  a.out = c.result(rows * a.V);
  a.softmax_max = c.result_floats(rows);
  a.softmax_sum = c.result_floats(rows);
  a.head_sum = c.flip() ? c.result_floats(queries * a.K) : nullptr;
  if (!c.run(longhaul_sparse_attention_expanded, longhaul_sparse_attention_expanded_workspace, a)) {
    return;
  }
  g.d_out = c.typed(rows * a.V);
  g.d_query = c.result(rows * a.D);
  g.d_key = c.result(key_rows * a.D);
  g.d_value = c.result(key_rows * a.V);
  c.run(longhaul_sparse_attention_expanded_grad, longhaul_sparse_attention_expanded_grad_workspace,
        g);
  if (!c.is_tame()) return;
  c.expect_numbers(a.out, rows * a.V, "out");
  c.expect_numbers(a.softmax_max, rows, "softmax_max");
  c.expect_numbers(a.softmax_sum, rows, "softmax_sum");
  if (a.head_sum) c.expect_numbers(a.head_sum, queries * a.K, "head_sum");
  c.expect_numbers(g.d_query, rows * a.D, "d_query");
  c.expect_numbers(g.d_key, key_rows * a.D, "d_key");
  c.expect_numbers(g.d_value, key_rows * a.V, "d_value");
}

void flash_attention(Case& c) {
  longhaul_flash_attention_grad_args g = {};
  auto& a = g.forward;
  c.dtype(a.dtype);
  a.B = c.batch();
  a.S = c.queries();
  a.L = c.keys();
  a.H = c.heads();
  a.D = c.columns();
  const bool has_value = c.flip();
  a.V = has_value ? c.columns() : a.D - 32 * c.number(0, 2);
  c.must_be(a.V > 0);
  a.key_heads = c.flip() ? 1 : c.size(a.H, a.H, {0, -1, a.H + 1});
  a.scale = static_cast<float>(c.number(-1, 4)) * 0.25F;
  const int64_t rows = a.B * a.S * a.H, key_rows = a.B * a.key_heads * a.L;
  a.query = c.typed(rows * a.D);
  a.key = c.typed(key_rows * a.D);
  a.value = has_value ? c.typed(key_rows * a.V) : nullptr;
  c.ranges(a.B * a.S, a.S, a.L, a.first_key, a.last_key);
  a.out = c.result(rows * a.V);
  a.softmax_max = c.result_floats(rows);
  a.softmax_sum = c.result_floats(rows);
  if (!c.run(longhaul_flash_attention, longhaul_flash_attention_workspace, a)) return;
  g.d_out = c.typed(rows * a.V);
  g.d_query = c.result(rows * a.D);
  g.d_key = c.result(key_rows * a.D);
  const bool wrong = c.rarely();
  c.must_be(!wrong);
  g.d_value = has_value != wrong ? c.result(key_rows * a.V) : nullptr;
  if (!c.run(longhaul_flash_attention_grad, longhaul_flash_attention_grad_workspace, g)) return;
  if (!c.is_tame()) return;
  c.expect_numbers(a.out, rows * a.V, "out");
  c.expect_numbers(a.softmax_max, rows, "softmax_max");
  c.expect_numbers(a.softmax_sum, rows, "softmax_sum");
  c.expect_numbers(g.d_query, rows * a.D, "d_query");
  c.expect_numbers(g.d_key, key_rows * a.D, "d_key");
  if (g.d_value) c.expect_numbers(g.d_value, key_rows * a.V, "d_value");
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
  c.dtype(a.dtype);
  a.B = c.batch();
  a.S = c.queries();
  a.L = c.keys();
  a.H = c.heads();
  a.D = c.columns();
  a.K = c.chosen_keys();
  const int64_t queries = a.B * a.S;
  a.query = c.typed(queries * a.H * a.D);
  a.key = c.typed(a.B * a.L * a.D);
  a.weights = c.floats(queries * a.H);
  a.indices = c.indices(queries, a.K, a.L);
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

int64_t some_queries(Case& c) {
  return c.size(0, c.rarely() ? 128 : 40, {-1, 129, Case::kLowest, Case::kHighest});
}

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
  c.dtype(a.dtype);
  a.S = some_queries(c);
  a.L = c.keys();
  a.H = c.heads();
  a.D = c.columns();
  a.key_heads = c.flip() ? 1 : c.size(a.H, a.H, {0, -1, a.H + 1});
  a.key_head_stride = a.L * a.D + c.number(0, 3);
  a.scale = static_cast<float>(c.number(-1, 4)) * 0.25F;
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
  c.dtype(a.dtype);
  a.S = some_queries(c);
  a.L = c.keys();
  a.H = c.heads();
  a.D = c.columns();
  const int64_t Q = (a.S + 31) / 32 * 32;
  a.query = c.typed(a.S * a.H * a.D);
  a.key = c.typed(a.L * a.D);
  a.weights = c.floats(a.S * a.H);
  c.ranges(a.S, std::max<int64_t>(a.S, 1), a.L, a.first_key, a.last_key);
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
