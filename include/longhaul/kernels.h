/* The fused CPU kernels without anything else: plain C, no libtorch. The maths is stated in
 * longhaul/ops/<operator>/<operator>.h. Arrays are contiguous, in the order that their comments
 * give, unless a stride (in elements) stands beside them, and may start at any multiple of 4 bytes.
 * Letters: B batch, S queries of a row of the batch, L keys of it, H heads, D head dim or features,
 * K selected keys, T tokens. Attention and indexer: H <= 128, D <= 2^20, L, K <= 2^30, B S <= 2^40.
 *
 * Each function computes on OpenMP's threads and gives the same bits on any number of them. Where
 * there is a workspace, the caller brings it: the `..._workspace` function tells its bytes for the
 * same arguments.
 * A function returns 0, or else an error's text, valid until the thread's next error. */
#ifndef LONGHAUL_KERNELS_H
#define LONGHAUL_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum longhaul_dtype { LONGHAUL_FLOAT32 = 0, LONGHAUL_BFLOAT16 = 1 } longhaul_dtype;

/* Query t sees keys first_key[t] to last_key[t]; none if the first comes after the last. D is even
 * in bf16. */
typedef struct longhaul_lightning_indexer_args {
  longhaul_dtype dtype; /* of query and key */
  int64_t B, S, L, H, D, K;
  const void* query;        /* [B, S, H, D] */
  const void* key;          /* [B, L, D] */
  const float* weights;     /* [B, S, H] */
  const int64_t* first_key; /* [B, S] */
  const int64_t* last_key;  /* [B, S] */
  int32_t* indices;         /* out [B, S, K], ascending, the tail -1 */
  float* scores;            /* out [B, S, K], the tail 0 */
} longhaul_lightning_indexer_args;

size_t longhaul_lightning_indexer_workspace(const longhaul_lightning_indexer_args* args);
const char* longhaul_lightning_indexer(const longhaul_lightning_indexer_args* args,
                                       void* workspace);

/* The gradient of the scores at selected keys. D is a multiple of 32. Where a key stands twice in a
 * row d_key lacks a share of its gradient. */
typedef struct longhaul_lightning_indexer_grad_args {
  longhaul_dtype dtype; /* of query, key and their gradients */
  int64_t B, S, L, H, D, K;
  const void* query;      /* [B, S, H, D] */
  const void* key;        /* [B, L, D] */
  const float* weights;   /* [B, S, H] */
  const int32_t* indices; /* [B, S, K], distinct in a row; -1: none */
  const float* d_scores;  /* [B, S, K] */
  void* d_query;          /* out [B, S, H, D] */
  void* d_key;            /* out [B, L, D] */
  float* d_weights;       /* out [B, S, H] */
} longhaul_lightning_indexer_grad_args;

size_t longhaul_lightning_indexer_grad_workspace(const longhaul_lightning_indexer_grad_args* args);
const char* longhaul_lightning_indexer_grad(const longhaul_lightning_indexer_grad_args* args,
                                            void* workspace);

/* Attention of all heads over one row of keys each (absorbed MLA); the values are the first V
 * columns of the keys. D and V are multiples of 32. The indices of a row are distinct: a key
 * that stands twice counts twice, but d_key lacks a share of its gradient. -1 anywhere means no
 * key. Ascending ones are fastest. */
typedef struct longhaul_sparse_attention_args {
  longhaul_dtype dtype; /* of query, key and out */
  int64_t B, S, L, H, D, V, K;
  float scale;
  const void* query;      /* [B, S, H, D] */
  const void* key;        /* [B, L, D] */
  const int32_t* indices; /* [B, S, K] */
  void* out;              /* [B, S, H, V] */
  float* softmax_max;     /* [B, S, H], natural base; 0 without a key */
  float* softmax_sum;     /* [B, S, H]; 0 without a key */
  float* head_sum;        /* [B, S, K] or null: the sum over heads of the probabilities */
} longhaul_sparse_attention_args;

size_t longhaul_sparse_attention_workspace(const longhaul_sparse_attention_args* args);
const char* longhaul_sparse_attention(const longhaul_sparse_attention_args* args, void* workspace);

/* head_sum alone, made again from softmax_max and softmax_sum as longhaul_sparse_attention gave
 * them for the same arguments; out is unused. */
size_t longhaul_sparse_attention_head_sum_workspace(const longhaul_sparse_attention_args* args);
const char* longhaul_sparse_attention_head_sum(const longhaul_sparse_attention_args* args,
                                               void* workspace);

typedef struct longhaul_sparse_attention_grad_args {
  longhaul_sparse_attention_args
      forward;       /* as it was called, with its results; head_sum is unused */
  const void* d_out; /* [B, S, H, V] */
  void* d_query;     /* out [B, S, H, D] */
  void* d_key;       /* out [B, L, D] */
} longhaul_sparse_attention_grad_args;

size_t longhaul_sparse_attention_grad_workspace(const longhaul_sparse_attention_grad_args* args);
const char* longhaul_sparse_attention_grad(const longhaul_sparse_attention_grad_args* args,
                                           void* workspace);

/* The same with keys and values for each head (expanded MLA); V may be larger than D. Rows of keys
 * and values are a stride apart, H of them a key. */
typedef struct longhaul_sparse_attention_expanded_args {
  longhaul_dtype dtype; /* of query, key, value and out */
  int64_t B, S, L, H, D, V, K;
  int64_t key_stride, value_stride; /* from a head's row to the next */
  float scale;
  const void* query;      /* [B, S, H, D] */
  const void* key;        /* [B, L, H, D] */
  const void* value;      /* [B, L, H, V] */
  const int32_t* indices; /* [B, S, K], for all heads */
  void* out;              /* [B, S, H, V] */
  float* softmax_max;     /* [B, S, H], natural base; 0 without a key */
  float* softmax_sum;     /* [B, S, H]; 0 without a key */
  float* head_sum;        /* [B, S, K] or null: the sum over heads of the probabilities */
} longhaul_sparse_attention_expanded_args;

size_t longhaul_sparse_attention_expanded_workspace(
    const longhaul_sparse_attention_expanded_args* args);
const char* longhaul_sparse_attention_expanded(const longhaul_sparse_attention_expanded_args* args,
                                               void* workspace);

/* head_sum alone, as longhaul_sparse_attention_head_sum; value and out are not read. V and
 * value_stride are checked as there. */
size_t longhaul_sparse_attention_expanded_head_sum_workspace(
    const longhaul_sparse_attention_expanded_args* args);
const char* longhaul_sparse_attention_expanded_head_sum(
    const longhaul_sparse_attention_expanded_args* args, void* workspace);

typedef struct longhaul_sparse_attention_expanded_grad_args {
  longhaul_sparse_attention_expanded_args
      forward;       /* as it was called, with its results; head_sum is unused */
  const void* d_out; /* [B, S, H, V] */
  void* d_query;     /* out [B, S, H, D] */
  void* d_key;       /* out [B, L, H, D] */
  void* d_value;     /* out [B, L, H, V] */
} longhaul_sparse_attention_expanded_grad_args;

size_t longhaul_sparse_attention_expanded_grad_workspace(
    const longhaul_sparse_attention_expanded_grad_args* args);
const char* longhaul_sparse_attention_expanded_grad(
    const longhaul_sparse_attention_expanded_grad_args* args, void* workspace);

/* Attention over all keys that a query sees. key_heads is 1 (all heads share a row of keys, as in
 * absorbed MLA) or H. D and V are multiples of 32. */
typedef struct longhaul_flash_attention_args {
  longhaul_dtype dtype; /* of query, key, value and out */
  int64_t B, S, L, H, D, V, key_heads;
  float scale;
  const void* query;        /* [B, S, H, D] */
  const void* key;          /* [B, key_heads, L, D] */
  const void* value;        /* [B, key_heads, L, V]; null: the first V columns of the keys */
  const int64_t* first_key; /* [B, S] */
  const int64_t* last_key;  /* [B, S] */
  void* out;                /* [B, S, H, V] */
  float* softmax_max;       /* [B, S, H], natural base; 0 without a key */
  float* softmax_sum;       /* [B, S, H]; 0 without a key */
} longhaul_flash_attention_args;

size_t longhaul_flash_attention_workspace(const longhaul_flash_attention_args* args);
const char* longhaul_flash_attention(const longhaul_flash_attention_args* args, void* workspace);

typedef struct longhaul_flash_attention_grad_args {
  longhaul_flash_attention_args forward; /* as it was called, with its results */
  const void* d_out;                     /* [B, S, H, V] */
  void* d_query;                         /* out [B, S, H, D] */
  void* d_key;                           /* out [B, key_heads, L, D] */
  void* d_value;                         /* out [B, key_heads, L, V]; null without value */
} longhaul_flash_attention_grad_args;

size_t longhaul_flash_attention_grad_workspace(const longhaul_flash_attention_grad_args* args);
const char* longhaul_flash_attention_grad(const longhaul_flash_attention_grad_args* args,
                                          void* workspace);

/* KL of the normalised head sum to the softmax of the index scores, and its gradients. D is a
 * multiple of 32. A query's loss is 0 where its head sum is 0. Of scores and head_sum nothing is
 * read where the index is -1. A key that stands twice in a row counts twice, but d_key lacks a
 * share of its gradient. */
typedef struct longhaul_indexer_kl_loss_args {
  longhaul_dtype dtype; /* of query, key and their gradients */
  int64_t B, S, L, H, D, K;
  const void* query;      /* [B, S, H, D] */
  const void* key;        /* [B, L, D] */
  const float* weights;   /* [B, S, H] */
  const int32_t* indices; /* [B, S, K], distinct in a row; -1: none */
  const float* scores;    /* [B, S, K] of the selection, or null: computed anew */
  const float* head_sum;  /* [B, S, K] */
  float* loss;            /* out [B, S] */
  void* d_query;          /* out [B, S, H, D], or null together with the next two */
  void* d_key;            /* out [B, L, D] */
  float* d_weights;       /* out [B, S, H] */
} longhaul_indexer_kl_loss_args;

size_t longhaul_indexer_kl_loss_workspace(const longhaul_indexer_kl_loss_args* args);
const char* longhaul_indexer_kl_loss(const longhaul_indexer_kl_loss_args* args, void* workspace);

/* The sum over heads of an attention's probabilities, of S <= 128 queries of one row of the batch
 * at L of its keys, which first_key and last_key count. D is a multiple of 32; Q is S rounded up to
 * a multiple of 32. */
typedef struct longhaul_attention_head_sum_args {
  longhaul_dtype dtype; /* of query and key */
  int64_t S, L, H, D, key_heads;
  int64_t key_head_stride; /* from a head's keys to the next one's */
  float scale;
  const void* query;        /* [S, H, D] */
  const void* key;          /* [key_heads, L, D] */
  const float* softmax_max; /* [S, H], as longhaul_flash_attention gave them */
  const float* softmax_sum; /* [S, H] */
  const int64_t* first_key; /* [S] */
  const int64_t* last_key;  /* [S] */
  float* head_sum;          /* out [L, Q], 0 where a query does not see the key or is not there */
} longhaul_attention_head_sum_args;

size_t longhaul_attention_head_sum_workspace(const longhaul_attention_head_sum_args* args);
const char* longhaul_attention_head_sum(const longhaul_attention_head_sum_args* args,
                                        void* workspace);

/* The loss of longhaul_indexer_kl_loss over all keys that a query sees, for queries and keys as in
 * longhaul_attention_head_sum. The softmax of the index scores is what
 * longhaul_dense_indexer_softmax gave, or made anew. */
typedef struct longhaul_dense_indexer_kl_loss_args {
  longhaul_dtype dtype; /* of query, key and d_query */
  int64_t S, L, H, D;
  const void* query;        /* [S, H, D] */
  const void* key;          /* [L, D] */
  const float* weights;     /* [S, H] */
  const int64_t* first_key; /* [S] */
  const int64_t* last_key;  /* [S] */
  const float* head_sum;    /* [L, Q] */
  float* softmax_max;       /* [S], natural base, or null together with the next one */
  float* softmax_sum;       /* [S] */
  float* loss;              /* out [S] */
  void* d_query;            /* out [S, H, D], or null together with the next two */
  float* d_key;             /* [L, D]; the gradient is added to it */
  float* d_weights;         /* out [S, H] */
} longhaul_dense_indexer_kl_loss_args;

size_t longhaul_dense_indexer_kl_loss_workspace(const longhaul_dense_indexer_kl_loss_args* args);
const char* longhaul_dense_indexer_kl_loss(const longhaul_dense_indexer_kl_loss_args* args,
                                           void* workspace);

/* Writes softmax_max and softmax_sum of the index scores, 0 for a query without a key. head_sum,
 * loss and gradients are null. */
size_t longhaul_dense_indexer_softmax_workspace(const longhaul_dense_indexer_kl_loss_args* args);
const char* longhaul_dense_indexer_softmax(const longhaul_dense_indexer_kl_loss_args* args,
                                           void* workspace);

/* FLOP/s that all threads reach with operands of the dtype in a loop on registers alone; looks for
 * that many seconds and takes the best. */
double longhaul_kernels_peak_flops(longhaul_dtype dtype, double seconds);

/* y = weight * cast(x * rstd), rstd = 1 / sqrt(mean(x^2) + eps) in fp32. With a residual all of it
 * of sum = cast(x + residual) in place of x. */
typedef struct longhaul_rms_norm_args {
  longhaul_dtype dtype; /* of x, weight, y, residual and sum */
  int64_t rows, D;
  int64_t x_stride; /* from a row of x to the next */
  float eps;
  const void* x;      /* [rows, D] */
  const void* weight; /* [D] */
  void* y;            /* out [rows, D] */
  float* rstd;        /* out [rows] */
  int64_t residual_stride;
  const void* residual; /* [rows, D], or null together with sum */
  void* sum;            /* out [rows, D] */
} longhaul_rms_norm_args;

const char* longhaul_rms_norm(const longhaul_rms_norm_args* args);

typedef struct longhaul_rms_norm_grad_args {
  longhaul_dtype dtype; /* of dy, x, weight and d_x */
  int64_t rows, D;
  int64_t dy_stride, x_stride;
  const void* dy;     /* [rows, D] */
  const void* x;      /* [rows, D] */
  const void* weight; /* [D] */
  const float* rstd;  /* [rows], as longhaul_rms_norm gave it */
  void* d_x;          /* out [rows, D] */
  float* d_weight;    /* out [D] */
  int64_t d_sum_stride;
  const void* d_sum; /* [rows, D] or null: is added to d_x after its rounding */
} longhaul_rms_norm_grad_args;

size_t longhaul_rms_norm_grad_workspace(const longhaul_rms_norm_grad_args* args);
const char* longhaul_rms_norm_grad(const longhaul_rms_norm_grad_args* args, void* workspace);

/* Turns the pairs of a row by its token's angles: (x0, x1), (x2, x3), ... if interleaved, else
 * (x_i, x_{i + R/2}). The gradient is the same with `backward`: by the negative angles. */
typedef struct longhaul_rotary_mul_args {
  longhaul_dtype dtype; /* of x and out */
  int interleaved, backward;
  int64_t T, H, R; /* R even */
  int64_t token_stride, head_stride;
  const void* x;    /* [T, H, R] */
  const float* cos; /* [T, R/2] */
  const float* sin; /* [T, R/2] */
  void* out;        /* out [T, H, R] */
} longhaul_rotary_mul_args;

const char* longhaul_rotary_mul(const longhaul_rotary_mul_args* args);

/* y = silu(gate) * up, element by element. Gate and up may be halves of the same rows. */
typedef struct longhaul_swiglu_args {
  longhaul_dtype dtype;
  int64_t rows, D;
  int64_t gate_stride, up_stride; /* from a row to the next */
  const void* gate;               /* [rows, D] */
  const void* up;                 /* [rows, D] */
  void* y;                        /* out [rows, D] */
} longhaul_swiglu_args;

const char* longhaul_swiglu(const longhaul_swiglu_args* args);

typedef struct longhaul_swiglu_grad_args {
  longhaul_dtype dtype;
  int64_t rows, D;
  int64_t dy_stride, gate_stride, up_stride;
  int64_t d_stride; /* of d_gate and of d_up */
  const void* dy;   /* [rows, D] */
  const void* gate; /* [rows, D] */
  const void* up;   /* [rows, D] */
  void* d_gate;     /* out [rows, D] */
  void* d_up;       /* out [rows, D] */
} longhaul_swiglu_grad_args;

const char* longhaul_swiglu_grad(const longhaul_swiglu_grad_args* args);

/* A run of rows for each of E groups, counts[e] of them, times the group's matrix. The runs follow
 * each other; rows behind the last one give 0. Transposed, it is the gradient of the rows. */
typedef struct longhaul_grouped_matmul_args {
  longhaul_dtype dtype;
  int transposed; /* 0: out = in weight^T, 1: out = in weight */
  int64_t M, N, K, E;
  const int64_t* counts; /* [E], together at most M */
  const void* in;        /* [M, K]; transposed: [M, N] */
  const void* weight;    /* [E, N, K] */
  void* out;             /* out [M, N]; transposed: [M, K] */
} longhaul_grouped_matmul_args;

size_t longhaul_grouped_matmul_workspace(const longhaul_grouped_matmul_args* args);
const char* longhaul_grouped_matmul(const longhaul_grouped_matmul_args* args, void* workspace);

/* The gradient of the matrices: d_weight[e] = dy^T x over the rows of group e, 0 without rows. */
typedef struct longhaul_grouped_matmul_grad_args {
  longhaul_dtype dtype;
  int64_t M, N, K, E;
  const int64_t* counts; /* [E] */
  const void* dy;        /* [M, N] */
  const void* x;         /* [M, K] */
  void* d_weight;        /* out [E, N, K] */
} longhaul_grouped_matmul_grad_args;

size_t longhaul_grouped_matmul_grad_workspace(const longhaul_grouped_matmul_grad_args* args);
const char* longhaul_grouped_matmul_grad(const longhaul_grouped_matmul_grad_args* args,
                                         void* workspace);

/* permuted[inverse[t, i]] = probs[t, i] * tokens[t] for k choices i of every token. `inverse` is a
 * permutation of the rows. With d_probs it is the gradient of longhaul_moe_token_unpermute at
 * `rows`, given its result's gradient as `tokens`: d_probs[t, i] = tokens[t] . rows[inverse[t, i]].
 */
typedef struct longhaul_moe_token_permute_args {
  longhaul_dtype dtype; /* of tokens, permuted and rows */
  int64_t T, k, D;
  const void* tokens;     /* [T, D] */
  const int64_t* inverse; /* [T, k] */
  const float* probs;     /* [T, k], or null: all 1 */
  void* permuted;         /* out [T * k, D] */
  const void* rows;       /* [T * k, D], or null together with d_probs */
  float* d_probs;         /* out [T, k] */
} longhaul_moe_token_permute_args;

const char* longhaul_moe_token_permute(const longhaul_moe_token_permute_args* args);

/* tokens[t] = sum over i of probs[t, i] * permuted[inverse[t, i]], in fp32. Without probs it is the
 * gradient of longhaul_moe_token_permute. */
typedef struct longhaul_moe_token_unpermute_args {
  longhaul_dtype dtype; /* of permuted and tokens */
  int64_t T, k, D;
  const void* permuted;   /* [T * k, D] */
  const int64_t* inverse; /* [T, k] */
  const float* probs;     /* [T, k], or null: all 1 */
  void* tokens;           /* out [T, D] */
} longhaul_moe_token_unpermute_args;

const char* longhaul_moe_token_unpermute(const longhaul_moe_token_unpermute_args* args);

/* Cross-entropy of rows of logits: loss = logsumexp(logits) - logits[label], 0 for the label -100.
 * With `gradient` the logits are replaced by the loss's: softmax - onehot(label), zeros for -100.
 */
typedef struct longhaul_cross_entropy_args {
  longhaul_dtype dtype; /* of logits */
  int gradient;
  int64_t rows, V;
  int64_t stride;        /* from a row of logits to the next */
  void* logits;          /* in, and out with `gradient` [rows, V] */
  const int64_t* labels; /* [rows], 0 .. V - 1 or -100 */
  float* loss;           /* out [rows] */
} longhaul_cross_entropy_args;

const char* longhaul_cross_entropy(const longhaul_cross_entropy_args* args);

/* AdamW over all parameters in one pass, every operation in fp32 and rounded once as IEEE 754 says:
 *   g = grad_scale * grad;   m = beta1 m + (1 - beta1) g;   v = beta2 v + (1 - beta2) g g
 *   p = p (1 - lr weight_decay) - lr / (1 - beta1^step) m / (sqrt(v) / sqrt(1 - beta2^step) + eps)
 * In bf16, m, v and p are rounded to nearest even when they are stored (denormals are kept); p is
 * made of m and v as they are stored. */
typedef struct longhaul_adam_w_parameter {
  longhaul_dtype dtype; /* of all four arrays; parameters may differ in it */
  int64_t n;
  int64_t step;        /* from 1 */
  double weight_decay; /* at least 0 */
  void* param;         /* [n] */
  const void* grad;    /* [n] */
  void* exp_avg;       /* [n] */
  void* exp_avg_sq;    /* [n] */
} longhaul_adam_w_parameter;

typedef struct longhaul_adam_w_args {
  int64_t count;
  const longhaul_adam_w_parameter* parameters; /* [count] */
  double lr;                                   /* at least 0 */
  double beta1, beta2;                         /* 0 to below 1 */
  double eps;                                  /* at least 0 */
  double grad_scale;
} longhaul_adam_w_args;

const char* longhaul_adam_w(const longhaul_adam_w_args* args);

/* The sum of the squares of all elements, in double precision. */
typedef struct longhaul_array {
  longhaul_dtype dtype;
  int64_t n;
  const void* data; /* [n] */
} longhaul_array;

typedef struct longhaul_sum_of_squares_args {
  int64_t count;
  const longhaul_array* arrays; /* [count] */
  double* sum;                  /* out, one number */
} longhaul_sum_of_squares_args;

size_t longhaul_sum_of_squares_workspace(const longhaul_sum_of_squares_args* args);
const char* longhaul_sum_of_squares(const longhaul_sum_of_squares_args* args, void* workspace);

/* The router's choice: scores of the experts, the k best by score + bias within the best groups,
 * and their gate weights. Ties go to the lowest expert and the lowest group. */
typedef struct longhaul_moe_gating_top_k_args {
  int64_t T, E, k;
  int64_t n_group, topk_group; /* n_group divides E */
  int softmax;                 /* else sigmoid */
  int normalize;               /* weights are divided by their sum + 1e-20 */
  int chosen;                  /* experts are given, not chosen */
  float scale;
  const float* logits; /* [T, E] */
  const float* bias;   /* [E] or null */
  float* scores;       /* out [T, E] */
  int64_t* experts;    /* out [T, k] by falling score + bias; in with `chosen` */
  float* weights;      /* out [T, k] */
} longhaul_moe_gating_top_k_args;

size_t longhaul_moe_gating_top_k_workspace(const longhaul_moe_gating_top_k_args* args);
const char* longhaul_moe_gating_top_k(const longhaul_moe_gating_top_k_args* args, void* workspace);

typedef struct longhaul_moe_gating_top_k_grad_args {
  longhaul_moe_gating_top_k_args forward; /* as it was called, with its results; logits, bias and
                                             weights are unused */
  const float* d_weights;                 /* [T, k] */
  const float* d_scores;                  /* [T, E] or null */
  float* d_logits;                        /* out [T, E] */
} longhaul_moe_gating_top_k_grad_args;

const char* longhaul_moe_gating_top_k_grad(const longhaul_moe_gating_top_k_grad_args* args);

/* "avx512_bf16", "avx512", "avx2", "portable", or null if LONGHAUL_ISA is wrong; and why. */
const char* longhaul_kernels_isa(void);
const char* longhaul_kernels_isa_reason(void);

#ifdef __cplusplus
}
#endif

#endif
