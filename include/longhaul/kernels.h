/* The CPU kernels of DeepSeek Sparse Attention without anything else: plain C, no libtorch. The
 * maths is stated in longhaul/ops/<operator>/<operator>.h. Arrays are contiguous, in the order that
 * their comments give, and may start at any multiple of 4 bytes. Letters: B batch, S queries of a
 * row of the batch, L keys of it, H heads, D head dim, K selected keys.
 *
 * Each function computes on OpenMP's threads and gives the same bits on any number of them. The
 * caller brings the workspace: the `..._workspace` function tells its bytes for the same arguments.
 * A function returns 0, or else an error's text that is valid forever. */
#ifndef LONGHAUL_KERNELS_H
#define LONGHAUL_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum longhaul_dtype { LONGHAUL_FLOAT32 = 0, LONGHAUL_BFLOAT16 = 1 } longhaul_dtype;

/* Query t sees keys first_key[t] to last_key[t]; none if the first comes after the last. */
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

/* Attention of all heads over one row of keys each (absorbed MLA); the values are the first V
 * columns of the keys. D and V are multiples of 32. The indices of a row are distinct; -1 anywhere
 * means no key. Ascending ones are fastest. */
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

/* KL of the normalised head sum to the softmax of the index scores, and its gradients. D is a
 * multiple of 32. A query's loss is 0 where its head sum is 0. */
typedef struct longhaul_indexer_kl_loss_args {
  longhaul_dtype dtype; /* of query, key and their gradients */
  int64_t B, S, L, H, D, K;
  const void* query;      /* [B, S, H, D] */
  const void* key;        /* [B, L, D] */
  const float* weights;   /* [B, S, H] */
  const int32_t* indices; /* [B, S, K] */
  const float* scores;    /* [B, S, K] of the selection, or null: computed anew */
  const float* head_sum;  /* [B, S, K] */
  float* loss;            /* out [B, S] */
  void* d_query;          /* out [B, S, H, D], or null together with the next two */
  void* d_key;            /* out [B, L, D] */
  float* d_weights;       /* out [B, S, H] */
} longhaul_indexer_kl_loss_args;

size_t longhaul_indexer_kl_loss_workspace(const longhaul_indexer_kl_loss_args* args);
const char* longhaul_indexer_kl_loss(const longhaul_indexer_kl_loss_args* args, void* workspace);

/* FLOP/s that all threads reach with operands of the dtype in a loop on registers alone; looks for
 * that many seconds and takes the best. */
double longhaul_kernels_peak_flops(longhaul_dtype dtype, double seconds);

/* "avx512_bf16", "avx512", "avx2" or "portable", and why. */
const char* longhaul_kernels_isa(void);
const char* longhaul_kernels_isa_reason(void);

#ifdef __cplusplus
}
#endif

#endif
