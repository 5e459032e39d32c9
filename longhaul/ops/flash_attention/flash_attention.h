// Dense causal attention over packed documents (DeepSeek-V3, and the indexer's dense warm-up).
//   P[t,h,.] = softmax over visible s of scale * q[t,h] . k[s(,h)],   out[t,h] = P[t,h,.] v
// Absorbed MLA: all heads share one key/value row (key [B, S, D], value [B, S, V]); expanded MLA: a
// row for each head (key [B, S, H, D], value [B, S, H, V]). query [B, S, H, D]; out [B, S, H, V] in
// the dtype of query. Scores, softmax and sums are fp32 (fp64 for fp64). A query that sees no key
// gives 0 and gets no gradient. Visibility: see ops/common.h.
// Fused: forward and backward in tiles of keys, nothing of size S x S. With delta_h = sum over
// columns of d_out out:
//   dS = P (d_out . v - delta) scale,   dq += dS k,   dk += dS q,   dv += P d_out
#pragma once

#include <ATen/core/Tensor.h>

#include "longhaul/ops/common.h"
#include "longhaul/ops/kernel.h"

namespace longhaul::ops {

using at::Tensor;

struct AttentionOptions {
  double scale = 1.0;
  // Without a value tensor: the values are the first value_dim columns of a shared key (absorbed
  // MLA, whose latent is both). The gradient then goes to the key.
  int64_t value_dim = 0;
  bool return_head_sum = false;    // sum over heads of P, what the indexer learns from
  bool return_statistics = false;  // softmax_max and softmax_sum, natural base
  Kernel kernel = Kernel::kReference;
};

struct AttentionResult {
  Tensor out_BSHV;
  // Both [B, S, H]; log-sum-exp = max + ln(sum). A query that sees no key has max 0 and sum 0.
  Tensor softmax_max, softmax_sum;
  // Detached. Dense: [B, S, S]; sparse: [B, S, K], at the selected keys, 0 in the tail.
  Tensor head_sum;
};

// Queries and keys may differ in number if `range` names each query's last key; a head sum is then
// made by HeadSums.
AttentionResult flash_attention(const Tensor& query_BSHD, const Tensor& key, const Tensor& value,
                                const KeyRange& range, const AttentionOptions& options);

// An attention that has run: its operands and statistics, as flash_attention took and returned
// them.
struct AttentionState {
  Tensor query_BSHD, key;
  Tensor value = {};                // undefined: the first columns of a shared key
  Tensor softmax_max, softmax_sum;  // [B, S, H]
  double scale = 1.0;
};

struct AttentionGradients {
  Tensor d_query, d_key, d_value;  // d_value is undefined without a value
};

// What follows is for callers that bring an autograd of their own: the gradients without autograd,
// by the fused kernel, where why_no_fused_attention finds nothing against it. Throws Error, with
// the tensor's name, for shapes that do not fit.
AttentionGradients flash_attention_grad(const AttentionState& attention, const KeyRange& range,
                                        const Tensor& out_BSHV, const Tensor& d_out_BSHV);

// Empty if the fused kernels of dense attention cover an attention with this query.
std::string why_no_fused_attention(const Tensor& query);

// The definition, in plain ATen: masked_attention with what is visible as a mask.
AttentionResult flash_attention_reference(const Tensor& query_BSHD, const Tensor& key,
                                          const Tensor& value, const KeyRange& range,
                                          const AttentionOptions& options);

// The reference for any mask [B, S, S] (true: attend). Dense and sparse attention are defined by
// it.
AttentionResult masked_attention(const Tensor& query_BSHD, const Tensor& key, const Tensor& value,
                                 const Tensor& mask_BSS, const AttentionOptions& options);

// Throws Error, naming the tensor, unless the shapes are those of the two forms above and the
// dtypes one.
void check_attention_operands(const Tensor& query_BSHD, const Tensor& key, const Tensor& value,
                              const AttentionOptions& options);

// The same for what a gradient is made of, dense or sparse.
void check_attention_grad(const AttentionState& attention, const Tensor& out_BSHV,
                          const Tensor& d_out_BSHV);

}  // namespace longhaul::ops
