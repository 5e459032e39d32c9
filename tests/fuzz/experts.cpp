// The router, and what takes tokens to experts and back.
#include "tests/fuzz/operators.h"

namespace longhaul::fuzz {

namespace {

struct Groups {
  int64_t M, N, K, E;
};
Groups groups(Case& c) {
  Groups s = {};
  s.M = c.size(0, c.rarely() ? 1100 : 40, {-1, Case::kLowest});
  s.N = c.size(1, 70, {0, Case::kLowest});
  s.K = c.size(1, 70, {0, Case::kLowest});
  s.E = c.size(0, 6, {-1, Case::kLowest});
  return s;
}

}  // namespace

void grouped_matmul(Case& c) {
  longhaul_grouped_matmul_args a = {};
  c.dtype(a.dtype);
  a.transposed = c.flip();
  const Groups s = groups(c);
  a.M = s.M;
  a.N = s.N;
  a.K = s.K;
  a.E = s.E;
  a.counts = c.counts(a.E, a.M);
  const int64_t in = a.transposed ? a.N : a.K, out = a.transposed ? a.K : a.N;
  a.in = c.typed(a.M * in);
  a.weight = c.typed(a.E * a.N * a.K);
  a.out = c.result(a.M * out);
  if (!c.run(longhaul_grouped_matmul, longhaul_grouped_matmul_workspace, a)) return;
  if (c.is_tame()) c.expect_numbers(a.out, a.M * out, "out");
  const int64_t bytes = c.is_bf16() ? 2 : 4;
  const char* all = static_cast<const char*>(a.out);
  for (int64_t i = std::accumulate(a.counts, a.counts + a.E, int64_t{0}) * out * bytes;
       i < a.M * out * bytes; ++i) {
    if (all[i] != 0) fail("a row behind the last group is not 0");
  }
}

void grouped_matmul_grad(Case& c) {
  longhaul_grouped_matmul_grad_args a = {};
  c.dtype(a.dtype);
  const Groups s = groups(c);
  a.M = s.M;
  a.N = s.N;
  a.K = s.K;
  a.E = s.E;
  a.counts = c.counts(a.E, a.M);
  a.dy = c.typed(a.M * a.N);
  a.x = c.typed(a.M * a.K);
  a.d_weight = c.result(a.E * a.N * a.K);
  if (!c.run(longhaul_grouped_matmul_grad, longhaul_grouped_matmul_grad_workspace, a)) return;
  if (c.is_tame()) c.expect_numbers(a.d_weight, a.E * a.N * a.K, "d_weight");
}

void moe_token_permute(Case& c) {
  longhaul_moe_token_permute_args a = {};
  c.dtype(a.dtype);
  a.T = c.size(0, 20, {-1, Case::kLowest});
  a.k = c.size(0, 8, {-1, Case::kLowest});
  a.D = c.width(0);
  const int64_t rows = a.T * a.k;
  a.tokens = c.typed(a.T * a.D);
  a.inverse = c.permutation(rows);
  a.probs = c.flip() ? c.floats(rows) : nullptr;
  a.permuted = c.result(rows * a.D);
  if (c.flip()) {
    const bool wrong = c.rarely();
    c.must_be(!wrong);
    a.rows = c.typed(rows * a.D);
    a.d_probs = wrong ? nullptr : c.result_floats(rows);
  }
  if (!c.run(longhaul_moe_token_permute, a) || !c.is_tame()) return;
  c.expect_numbers(a.permuted, rows * a.D, "permuted");
  if (a.d_probs) c.expect_numbers(a.d_probs, rows, "d_probs");
}

void moe_token_unpermute(Case& c) {
  longhaul_moe_token_unpermute_args a = {};
  c.dtype(a.dtype);
  a.T = c.size(0, 20, {-1, Case::kLowest});
  a.k = c.size(0, 8, {-1, Case::kLowest});
  a.D = c.width(0);
  a.permuted = c.typed(a.T * a.k * a.D);
  a.inverse = c.permutation(a.T * a.k);
  a.probs = c.flip() ? c.floats(a.T * a.k) : nullptr;
  a.tokens = c.result(a.T * a.D);
  if (!c.run(longhaul_moe_token_unpermute, a)) return;
  if (c.is_tame()) c.expect_numbers(a.tokens, a.T * a.D, "tokens");
}

namespace {

// The chosen of a token by falling score + bias, ties to the lowest, and none better left out.
void check_experts(const longhaul_moe_gating_top_k_args& a, bool is_finite) {
  for (int64_t token = 0; token < a.T; ++token) {
    const int64_t* experts = a.experts + token * a.k;
    const auto is_before = [&](int64_t x, int64_t y) {
      const float* scores = a.scores + token * a.E;
      const float of_x = a.bias ? scores[x] + a.bias[x] : scores[x];
      const float of_y = a.bias ? scores[y] + a.bias[y] : scores[y];
      return of_x > of_y || (of_x == of_y && x < y);
    };
    std::vector<bool> is_chosen(static_cast<size_t>(a.E));
    for (int64_t i = 0; i < a.k; ++i) {
      if (experts[i] < 0 || experts[i] >= a.E) fail("an expert out of range");
      if (is_chosen[static_cast<size_t>(experts[i])]) fail("an expert twice");
      is_chosen[static_cast<size_t>(experts[i])] = true;
    }
    if (!is_finite || a.n_group > 1) continue;
    for (int64_t i = 1; i < a.k; ++i) {
      if (!is_before(experts[i - 1], experts[i])) fail("experts in wrong order");
    }
    for (int64_t e = 0; e < a.E; ++e) {
      if (!is_chosen[static_cast<size_t>(e)] && is_before(e, experts[a.k - 1])) {
        fail("a better expert left out");
      }
    }
  }
}

void sometimes_wrong_expert(Case& c, longhaul_moe_gating_top_k_args& a) {
  if (!c.rarely() || !c.is_valid() || a.T == 0) return;
  const int64_t wrong[] = {-1, a.E, Case::kLowest, Case::kHighest};
  a.experts[a.T * a.k - 1] = wrong[c.number(0, 3)];
  c.must_be(false);
}

}  // namespace

void moe_gating_top_k(Case& c) {
  longhaul_moe_gating_top_k_grad_args g = {};
  auto& a = g.forward;
  a.T = c.size(0, c.rarely() ? 600 : 20, {-1, Case::kLowest});
  a.n_group = c.size(1, c.flip() ? 1 : 20, {0, -1, Case::kLowest});
  a.E = c.size(a.n_group, a.n_group, {0, -1, Case::kLowest}) * c.number(1, 9);
  c.must_be(a.E > 0);
  a.k = c.size(1, std::max<int64_t>(a.E, 1), {0, -1, Case::kLowest, Case::kHighest});
  a.topk_group = c.size(1, std::max<int64_t>(a.n_group, 1), {0, -1, Case::kLowest, Case::kHighest});
  a.softmax = c.flip();
  a.normalize = c.flip();
  a.chosen = c.number(0, 3) == 3;
  a.scale = 2.5F;
  a.logits = c.floats(a.T * a.E);
  a.bias = c.flip() ? c.floats(a.E) : nullptr;
  a.scores = c.result_floats(a.T * a.E);
  a.weights = c.result_floats(a.T * a.k);
  a.experts = c.keep(c.integers<int64_t>(a.T * a.k));
  for (int64_t i = 0; c.is_valid() && a.chosen && i < a.T * a.k; ++i) a.experts[i] = i % a.k;
  if (a.chosen) sometimes_wrong_expert(c, a);
  if (!c.run(longhaul_moe_gating_top_k, longhaul_moe_gating_top_k_workspace, a)) return;
  if (!a.chosen) check_experts(a, c.is_finite());
  g.d_weights = c.floats(a.T * a.k);
  g.d_scores = c.flip() ? c.floats(a.T * a.E) : nullptr;
  g.d_logits = c.result_floats(a.T * a.E);
  sometimes_wrong_expert(c, a);
  if (!c.run(longhaul_moe_gating_top_k_grad, g)) return;
  if (c.is_finite()) c.expect_numbers(a.scores, a.T * a.E, "scores");
  if (c.is_finite()) c.expect_numbers(a.weights, a.T * a.k, "weights");
  if (c.is_tame()) c.expect_numbers(g.d_logits, a.T * a.E, "d_logits");
}

}  // namespace longhaul::fuzz
