// Kernels that go through rows and elements.
#include "tests/fuzz/operators.h"

namespace longhaul::fuzz {

namespace {

// The elements from the first row's beginning to the last one's end.
int64_t strided(int64_t rows, int64_t stride, int64_t width) {
  return rows == 0 ? 0 : (rows - 1) * stride + width;
}

}  // namespace

void rms_norm(Case& c) {
  longhaul_rms_norm_args a = {};
  c.dtype(a.dtype);
  a.rows = c.size(0, 40, {-1, Case::kLowest});
  a.D = c.width(1);
  a.x_stride = c.number(0, 3) == 0 ? 0 : a.D + c.number(0, 3);
  a.residual_stride = a.D + c.number(0, 3);
  a.eps = 1e-6F;
  a.x = c.typed(strided(a.rows, a.x_stride, a.D));
  a.weight = c.typed(a.D);
  a.y = c.result(a.rows * a.D);
  a.rstd = c.result_floats(a.rows);
  if (c.flip()) {
    a.residual = c.typed(strided(a.rows, a.residual_stride, a.D));
    a.sum = c.result(a.rows * a.D);
  }
  if (!c.run(longhaul_rms_norm, a)) return;
  longhaul_rms_norm_grad_args g = {};
  g.dtype = a.dtype;
  g.rows = a.rows;
  g.D = a.D;
  g.x = a.x;
  g.x_stride = a.x_stride;
  g.dy_stride = a.D + c.number(0, 3);
  g.d_sum_stride = a.D + c.number(0, 3);
  g.dy = c.typed(strided(a.rows, g.dy_stride, a.D));
  g.weight = a.weight;
  g.rstd = a.rstd;
  g.d_sum = c.flip() ? c.typed(strided(a.rows, g.d_sum_stride, a.D)) : nullptr;
  g.d_x = c.result(a.rows * a.D);
  g.d_weight = c.result_floats(a.D);
  c.run(longhaul_rms_norm_grad, longhaul_rms_norm_grad_workspace, g);
  if (!c.is_tame()) return;
  c.expect_numbers(a.y, a.rows * a.D, "y");
  c.expect_numbers(a.rstd, a.rows, "rstd");
  c.expect_numbers(g.d_x, a.rows * a.D, "d_x");
  c.expect_numbers(g.d_weight, a.D, "d_weight");
}

void rotary_mul(Case& c) {
  longhaul_rotary_mul_args a = {};
  c.dtype(a.dtype);
  a.interleaved = c.flip();
  a.backward = c.flip();
  a.T = c.size(0, 20, {-1, Case::kLowest});
  a.H = c.size(0, c.rarely() ? 500 : 8, {-1, Case::kLowest});
  a.R = c.size(0, 0, {1, -1, Case::kLowest}) + 2 * c.number(0, 60);
  a.head_stride = a.R + c.number(0, 3);
  a.token_stride = a.H * a.head_stride + c.number(0, 3);
  const bool none = a.T == 0 || a.H == 0;
  a.x = c.typed(none ? 0 : (a.T - 1) * a.token_stride + strided(a.H, a.head_stride, a.R));
  a.cos = c.floats(a.T * a.R / 2);
  a.sin = c.floats(a.T * a.R / 2);
  a.out = c.result(a.T * a.H * a.R);
  if (!c.run(longhaul_rotary_mul, a)) return;
  if (c.is_tame()) c.expect_numbers(a.out, a.T * a.H * a.R, "out");
}

void swiglu(Case& c) {
  longhaul_swiglu_args a = {};
  c.dtype(a.dtype);
  a.rows = c.size(0, 10, {-1, Case::kLowest});
  a.D = c.width(0);
  const int64_t gap = c.flip() ? 0 : c.number(1, 3), stride = a.D + gap;
  const int64_t elements = strided(a.rows, stride, a.D);
  a.gate_stride = a.up_stride = stride;
  a.gate = c.typed(elements);
  a.up = c.typed(elements);
  a.y = c.result(a.rows * a.D);
  if (!c.run(longhaul_swiglu, a)) return;
  longhaul_swiglu_grad_args g = {};
  g.dtype = a.dtype;
  g.rows = a.rows;
  g.D = a.D;
  g.gate_stride = g.up_stride = stride;
  g.dy_stride = a.D + c.number(0, 1);
  g.d_stride = a.D + c.number(0, 1);
  g.dy = c.typed(strided(a.rows, g.dy_stride, a.D));
  g.gate = a.gate;
  g.up = a.up;
  // The elements between the rows stay as they are.
  const int64_t written = strided(a.rows, g.d_stride, a.D);
  g.d_gate = c.keep(c.typed(written));
  g.d_up = c.keep(c.typed(written));
  c.run(longhaul_swiglu_grad, g);
  if (c.is_finite()) c.expect_numbers(a.y, a.rows * a.D, "y");
  if (!c.is_tame()) return;
  c.expect_numbers(g.d_gate, written, "d_gate");
  c.expect_numbers(g.d_up, written, "d_up");
}

void cross_entropy(Case& c) {
  longhaul_cross_entropy_args a = {};
  c.dtype(a.dtype);
  a.gradient = c.flip();
  a.rows = c.size(0, 20, {-1, Case::kLowest});
  a.V = c.width(0);
  a.stride = a.V + c.number(0, 3);
  const int64_t elements = strided(a.rows, a.stride, a.V);
  a.logits = c.keep(c.typed(elements));
  auto* labels = c.integers<int64_t>(a.rows);
  const int64_t wrong[] = {-1, a.V, -99, Case::kLowest, Case::kHighest};
  for (int64_t row = 0; c.is_valid() && row < a.rows; ++row) {
    const bool is_wrong = c.rarely() && c.rarely();
    labels[row] = is_wrong                 ? wrong[c.number(0, 4)]
                  : a.V == 0 || c.rarely() ? -100
                                           : c.number(0, a.V - 1);
    if (is_wrong) {
      c.must_be(false);
      break;
    }
  }
  a.labels = labels;
  a.loss = c.result_floats(a.rows);
  if (!c.run(longhaul_cross_entropy, a) || !c.is_finite()) return;
  c.expect_numbers(a.loss, a.rows, "loss");
  if (a.gradient) c.expect_numbers(a.logits, elements, "the gradient of logits");
}

void adam_w(Case& c) {
  std::vector<longhaul_adam_w_parameter> parameters(static_cast<size_t>(c.number(0, 4)));
  for (auto& p : parameters) {
    c.dtype(p.dtype);
    p.n = c.size(0, c.rarely() ? 70000 : 100, {-1, Case::kLowest});
    p.step = c.size(1, 100, {0, -1, Case::kLowest});
    p.weight_decay = 0.1;
    p.param = c.keep(c.typed(p.n));
    p.grad = c.typed(p.n);
    p.exp_avg = c.keep(c.typed(p.n));
    p.exp_avg_sq = c.keep(c.typed(p.n, 0));
  }
  const bool wrong = c.rarely();
  c.must_be(!wrong);
  const longhaul_adam_w_args a = {.count = static_cast<int64_t>(parameters.size()),
                                  .parameters = parameters.data(),
                                  .lr = wrong ? -1e-2 : 1e-2,
                                  .beta1 = c.flip() ? 0.9 : 0,
                                  .beta2 = c.flip() ? 0.95 : 0,
                                  .eps = 1e-8,
                                  .grad_scale = c.flip() ? 1 : 0.5};
  if (!c.run(longhaul_adam_w, a) || !c.is_tame()) return;
  for (const auto& p : parameters) c.expect_numbers(p.dtype, p.param, p.n, "param");
}

void sum_of_squares(Case& c) {
  std::vector<longhaul_array> arrays(static_cast<size_t>(c.number(0, 4)));
  for (auto& array : arrays) {
    c.dtype(array.dtype);
    array.n = c.size(0, c.rarely() ? 70000 : 100, {-1, Case::kLowest});
    array.data = c.typed(array.n);
  }
  auto* sum = c.keep(c.integers<double>(1));
  const longhaul_sum_of_squares_args a = {
      .count = static_cast<int64_t>(arrays.size()), .arrays = arrays.data(), .sum = sum};
  if (!c.run(longhaul_sum_of_squares, longhaul_sum_of_squares_workspace, a)) return;
  if (c.is_finite() && !std::isfinite(*sum)) fail("squares of numbers give no number");
}

}  // namespace longhaul::fuzz
