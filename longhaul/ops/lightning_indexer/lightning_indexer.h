// The lightning indexer of DeepSeek-V3.2 (technical report, equation 1) and its top-k.
//   I[t,s] = sum over j of w[t,j] * relu(q[t,j] . k[s])      in fp32 (fp64 for fp64)
// S_t = the min(K, visible) visible keys of largest I[t,.]; ties go to the lowest s; NaN counts
// as the largest score, so that it reaches the loss. No gradient flows through the selection: the
// indexer learns from its KL loss (ops/indexer_kl_loss). The gradient of the scores, given dI:
//   dw[t,j] = sum_s dI[t,s] relu(q[t,j] . k[s]),   d(q[t,j] . k[s]) = dI[t,s] w[t,j] where it is >
//   0
// query [B, S, Hi, Di], key [B, S, Di], weights [B, S, Hi] (already scaled by Hi^-0.5 Di^-0.5).
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "longhaul/ops/common.h"
#include "longhaul/ops/kernel.h"

namespace longhaul::ops {

using at::Tensor;

struct IndexerSelection {
  Tensor indices_BSK;  // int32, K = min(topk, keys), ascending by s, tail filled with -1
  Tensor scores_BSK;   // I at these keys, 0 in the tail
};

struct IndexerInputs {
  Tensor query_BSHD, key_BSD, weights_BSH;
};

// Selects for each query its top-k visible keys (KeyRange in ops/common.h); queries and keys may
// differ in number.
// Fused: one pass, nothing of size S x S; -inf counts as the lowest number and NaN comes back as
// inf.
IndexerSelection lightning_indexer(const Tensor& query_BSHD, const Tensor& key_BSD,
                                   const Tensor& weights_BSH, const KeyRange& range, int64_t topk,
                                   Kernel kernel = Kernel::kReference);

// The gradients of the inputs, in their dtypes, from those of the scores at indices [B, S, K] int32
// (distinct in a row; -1: none), d_scores [B, S, K]. Throws Error for shapes that do not fit.
IndexerInputs lightning_indexer_grad(const IndexerInputs& in, const Tensor& indices_BSK,
                                     const Tensor& d_scores_BSK,
                                     Kernel kernel = Kernel::kReference);

// Throws Error unless query, key and weights fit together, in shape and dtype.
void check_indexer_inputs(const IndexerInputs& in);

// Empty if the kernels of the indexer's gradients cover the inputs.
std::string why_no_fused_indexer_grad(const IndexerInputs& in);

// The definition, in plain ATen.
IndexerSelection lightning_indexer_reference(const Tensor& query_BSHD, const Tensor& key_BSD,
                                             const Tensor& weights_BSH, const KeyRange& range,
                                             int64_t topk);

IndexerInputs lightning_indexer_grad_reference(const IndexerInputs& in, const Tensor& indices_BSK,
                                               const Tensor& d_scores_BSK);

// All scores I [B, S, S] without masking. Part of the reference; other operators' references use
// it.
Tensor indexer_scores(const Tensor& query_BSHD, const Tensor& key_BSD, const Tensor& weights_BSH);

// The same together with what their gradient needs.
struct IndexerScores {
  Tensor scores_BSS;
  Tensor dots;  // relu(q . k) [B * S, H, keys]
};
IndexerScores indexer_scores_and_dots(const IndexerInputs& in);

// The gradient of all scores; `dots` are overwritten.
struct IndexerScoresGradients {
  IndexerInputs grads;  // in the dtypes of the inputs
  Tensor d_key;         // before it is rounded
};
IndexerScoresGradients indexer_scores_grad(const IndexerInputs& in, Tensor& dots,
                                           const Tensor& d_scores_BSS);

// The keys of `selected` [B, S, S] (bool) as ascending int32 indices [B, S, K], tail -1. At most K
// may be set in a row.
Tensor mask_to_indices(const Tensor& selected_BSS, int64_t K);

// The inverse: a bool mask [B, S, S] of indices [B, S, K]; -1 may stand anywhere in a row.
// An index of S or more is an error.
Tensor indices_to_mask(const Tensor& indices_BSK, int64_t S);

}  // namespace longhaul::ops
