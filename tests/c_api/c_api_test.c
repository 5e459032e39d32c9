/* A program in C that computes with the kernels: what include/longhaul/kernels.h promises to one.
 *   c_api_test          calls kernels and compares what comes out
 *   c_api_test refused  expects, under a wrong LONGHAUL_ISA, errors and not the end of the process
 * Exit status 0, or 1 with what is wrong on stderr. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "include/longhaul/kernels.h"

static int failures = 0;

static void expect(int right, const char* what, const char* error) {
  if (right) return;
  fprintf(stderr, "%s%s%s\n", what, error ? ": " : "", error ? error : "");
  ++failures;
}

static void expect_near(double actual, double expected, const char* what) {
  if (fabs(actual - expected) <= 1e-5 * fmax(1, fabs(expected))) return;
  fprintf(stderr, "%s: expected %.9g, got %.9g\n", what, expected, actual);
  ++failures;
}

static void expect_text(const char* error, const char* expected) {
  if (error && strcmp(error, expected) == 0) return;
  fprintf(stderr, "expected \"%s\", got \"%s\"\n", expected, error ? error : "");
  ++failures;
}

static void norm_of_a_row(void) {
  const float x[4] = {1, -2, 3, -4}, weight[4] = {1, 1, 2, 0.5F};
  float y[4], rstd;
  longhaul_rms_norm_args a;
  memset(&a, 0, sizeof a);
  a.dtype = LONGHAUL_FLOAT32;
  a.rows = 1;
  a.D = a.x_stride = 4;
  a.x = x;
  a.weight = weight;
  a.y = y;
  a.rstd = &rstd;
  const char* error = longhaul_rms_norm(&a);
  expect(!error, "longhaul_rms_norm", error);
  expect_near(rstd, 1 / sqrt(7.5), "rstd");
  for (int i = 0; i < 4; ++i) expect_near(y[i], x[i] * weight[i] / sqrt(7.5), "y");
}

/* One query of one head that sees two of three keys, the first 32 of whose columns are the values:
 * forward, and the gradient of the sum of `out`. */
enum { kKeys = 3, kColumns = 32, kChosen = 4 };

static void attention_over_chosen_keys(void) {
  float query[kColumns] = {0}, key[kKeys * kColumns] = {0}, out[kColumns], max, sum;
  float ones[kColumns], d_query[kColumns], d_key[kKeys * kColumns];
  const int32_t indices[kChosen] = {-1, 2, -1, 1};
  query[0] = 2;
  for (int s = 0; s < kKeys; ++s) key[s * kColumns] = (float)s;
  for (int i = 0; i < kColumns; ++i) ones[i] = 1;
  longhaul_sparse_attention_grad_args g;
  memset(&g, 0, sizeof g);
  longhaul_sparse_attention_args* a = &g.forward;
  a->dtype = LONGHAUL_FLOAT32;
  a->B = a->S = a->H = 1;
  a->L = kKeys;
  a->D = a->V = kColumns;
  a->K = kChosen;
  a->scale = 0.5F;
  a->query = query;
  a->key = key;
  a->indices = indices;
  a->out = out;
  a->softmax_max = &max;
  a->softmax_sum = &sum;
  void* workspace = malloc(longhaul_sparse_attention_workspace(a) + 1);
  const char* error = longhaul_sparse_attention(a, workspace);
  expect(!error, "longhaul_sparse_attention", error);
  free(workspace);
  /* Logits 1 and 2. */
  const double p = 1 / (1 + exp(-1.0)), spread = p * (1 - p);
  expect_near(max, 2, "softmax_max");
  expect_near(sum, 1 + exp(-1.0), "softmax_sum");
  expect_near(out[0], 2 * p + (1 - p), "out");

  g.d_out = ones;
  g.d_query = d_query;
  g.d_key = d_key;
  workspace = malloc(longhaul_sparse_attention_grad_workspace(&g) + 1);
  error = longhaul_sparse_attention_grad(&g, workspace);
  expect(!error, "longhaul_sparse_attention_grad", error);
  free(workspace);
  /* dS = p (1 - p) (value2 - value1) scale at key 2 and its negative at key 1. */
  const double d_score = spread * 0.5;
  expect_near(d_query[0], d_score * (2 - 1), "d_query");
  expect_near(d_key[0], 0, "d_key of a key that is not chosen");
  expect_near(d_key[1 * kColumns], (1 - p) - d_score * 2, "d_key");
  expect_near(d_key[2 * kColumns], p + d_score * 2, "d_key");
  expect_near(d_key[2 * kColumns + 1], p, "d_key");
}

static void loss_of_a_row(void) {
  float logits[3] = {0, 1, 2}, loss;
  const int64_t label = 1;
  longhaul_cross_entropy_args a;
  memset(&a, 0, sizeof a);
  a.dtype = LONGHAUL_FLOAT32;
  a.gradient = 1;
  a.rows = 1;
  a.V = a.stride = 3;
  a.logits = logits;
  a.labels = &label;
  a.loss = &loss;
  const char* error = longhaul_cross_entropy(&a);
  expect(!error, "longhaul_cross_entropy", error);
  const double sum = 1 + exp(1.0) + exp(2.0);
  expect_near(loss, log(sum) - 1, "loss");
  for (int i = 0; i < 3; ++i) expect_near(logits[i], exp(i) / sum - (i == 1), "gradient");
}

/* A parameter of one number in bf16: 1 - lr, since the first step goes by the learning rate. */
static void step_in_bf16(void) {
  uint16_t param = 0x3f80, exp_avg = 0, exp_avg_sq = 0;
  const uint16_t grad = 0x3f80;
  longhaul_adam_w_parameter p;
  memset(&p, 0, sizeof p);
  p.dtype = LONGHAUL_BFLOAT16;
  p.n = p.step = 1;
  p.param = &param;
  p.grad = &grad;
  p.exp_avg = &exp_avg;
  p.exp_avg_sq = &exp_avg_sq;
  longhaul_adam_w_args a;
  memset(&a, 0, sizeof a);
  a.count = 1;
  a.parameters = &p;
  a.lr = a.beta1 = a.beta2 = 0.5;
  a.grad_scale = 1;
  const char* error = longhaul_adam_w(&a);
  expect(!error, "longhaul_adam_w", error);
  expect(param == 0x3f00, "a parameter in bf16 is not 0.5", NULL);
  expect(exp_avg == 0x3f00 && exp_avg_sq == 0x3f00, "moments in bf16 are not 0.5", NULL);
}

/* Of two parameters without elements, the second with a wrong number each time. */
static void refused_steps(void) {
  longhaul_adam_w_parameter p[2];
  memset(p, 0, sizeof p);
  p[0].step = p[1].step = 1;
  longhaul_adam_w_args a;
  memset(&a, 0, sizeof a);
  a.count = 2;
  a.parameters = p;
  a.beta1 = a.beta2 = 0.5;
  const struct {
    double *number, wrong;
    const char* expected;
  } numbers[] = {
      {&a.lr, -0.5, "lr: expected at least 0, got -0.5"},
      {&a.lr, NAN, "lr: expected at least 0, got nan"},
      {&a.eps, -1e-8, "eps: expected at least 0, got -1e-08"},
      {&a.eps, NAN, "eps: expected at least 0, got nan"},
      {&a.beta1, 1, "beta1: expected 0 to below 1, got 1"},
      {&a.beta1, -0.5, "beta1: expected 0 to below 1, got -0.5"},
      {&a.beta1, NAN, "beta1: expected 0 to below 1, got nan"},
      {&a.beta2, 1, "beta2: expected 0 to below 1, got 1"},
      {&a.beta2, -0.5, "beta2: expected 0 to below 1, got -0.5"},
      {&a.beta2, NAN, "beta2: expected 0 to below 1, got nan"},
      {&p[1].weight_decay, -0.1, "parameters[1].weight_decay: expected at least 0, got -0.1"},
      {&p[1].weight_decay, NAN, "parameters[1].weight_decay: expected at least 0, got nan"},
  };
  for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; ++i) {
    const double right = *numbers[i].number;
    *numbers[i].number = numbers[i].wrong;
    expect_text(longhaul_adam_w(&a), numbers[i].expected);
    *numbers[i].number = right;
  }
  const struct {
    int64_t *number, wrong;
    const char* expected;
  } counts[] = {
      {&p[1].n, -1, "parameters[1].n: expected at least 0, got -1"},
      {&p[1].step, 0, "parameters[1].step: expected at least 1, got 0"},
  };
  for (size_t i = 0; i < sizeof counts / sizeof counts[0]; ++i) {
    const int64_t right = *counts[i].number;
    *counts[i].number = counts[i].wrong;
    expect_text(longhaul_adam_w(&a), counts[i].expected);
    *counts[i].number = right;
  }
  expect(!longhaul_adam_w(&a), "parameters without elements", longhaul_adam_w(&a));
  p[1].dtype = (longhaul_dtype)2;
  expect_text(longhaul_adam_w(&a),
              "parameters[1].dtype: expected LONGHAUL_FLOAT32 (0) or LONGHAUL_BFLOAT16 (1), got 2");
}

static void errors_say_what_was_expected(void) {
  longhaul_sparse_attention_args a;
  memset(&a, 0, sizeof a);
  a.H = 129;
  a.D = a.V = 32;
  a.K = 1;
  const char* error = longhaul_sparse_attention(&a, NULL);
  expect(error && strcmp(error, "H: expected 1 to 128 heads, got 129") == 0, "129 heads", error);
  expect(longhaul_sparse_attention_workspace(&a) == 0, "a workspace for 129 heads", NULL);
}

static void expect_refusals(void) {
  longhaul_rms_norm_args norm;
  memset(&norm, 0, sizeof norm);
  norm.D = 1;
  longhaul_sum_of_squares_args squares;
  memset(&squares, 0, sizeof squares);
  const char* named = "LONGHAUL_ISA = ";
  const char* errors[] = {longhaul_kernels_isa_reason(), NULL, NULL};
  expect(errors[0] && strstr(errors[0], named) == errors[0], "the reason", errors[0]);
  errors[1] = longhaul_rms_norm(&norm);
  expect(errors[1] && strstr(errors[1], named) == errors[1], "longhaul_rms_norm", errors[1]);
  errors[2] = longhaul_sum_of_squares(&squares, NULL);
  expect(errors[2] && strstr(errors[2], named) == errors[2], "longhaul_sum_of_squares", errors[2]);
  expect(longhaul_kernels_isa() == NULL, "an instruction set", longhaul_kernels_isa());
  expect(longhaul_sum_of_squares_workspace(&squares) == 0, "a workspace", NULL);
  expect(longhaul_kernels_peak_flops(LONGHAUL_FLOAT32, 0.01) == 0, "FLOP/s", NULL);
}

int main(int argc, char** argv) {
  if (argc > 1 && strcmp(argv[1], "refused") == 0) {
    expect_refusals();
  } else {
    expect(longhaul_kernels_isa() != NULL, "no instruction set", longhaul_kernels_isa_reason());
    norm_of_a_row();
    attention_over_chosen_keys();
    loss_of_a_row();
    step_in_bf16();
    refused_steps();
    errors_say_what_was_expected();
  }
  return failures == 0 ? 0 : 1;
}
