// DeepSeek Sparse Attention: attention of each query over its selected keys only (DeepSeek-V3.2
// report, equation 2). The maths, layouts and results of ops/flash_attention, with softmax over
// S_t = indices[t,.]. indices [B, S, K] int32; -1 may stand anywhere in a row and means no key.
// Fused: for absorbed MLA (values are the first columns of a shared key, no value tensor) and for
// expanded MLA (keys and values of each head), with distinct indices in a row. With delta_h = sum
// over columns of d_out out:
//   dS = P (d_out . v - delta) scale,   dq += dS k,   dk += dS q,   dv += P d_out
#pragma once

#include "longhaul/ops/flash_attention/flash_attention.h"
#include "longhaul/ops/flash_attention/head_sum.h"

namespace longhaul::ops {

AttentionResult sparse_flash_attention(const Tensor& query_BSHD, const Tensor& key,
                                       const Tensor& value, const Tensor& indices_BSK,
                                       const AttentionOptions& options);

// What follows is for callers that bring an autograd of their own: the gradients without autograd,
// by the fused kernels, where why_no_fused_sparse_attention finds nothing against them.
AttentionGradients sparse_flash_attention_grad(const AttentionState& attention,
                                               const Tensor& indices_BSK, const Tensor& out_BSHV,
                                               const Tensor& d_out_BSHV);

// The sum over heads of P at the selected keys, [B, S, K] in fp32 (fp64 for fp64), 0 where there is
// none: what the indexer learns from. What the kernels do not cover (fp64, more than 128 heads) is
// computed by definition.
Tensor sparse_attention_head_sum(const AttentionState& attention, const Tensor& indices_BSK);

// Empty if the fused kernels cover the operands; `value` may be undefined.
std::string why_no_fused_sparse_attention(const Tensor& query, const Tensor& key,
                                          const Tensor& value);

// The definition, in plain ATen: masked_attention with the indices as a mask.
AttentionResult sparse_flash_attention_reference(const Tensor& query_BSHD, const Tensor& key,
                                                 const Tensor& value, const Tensor& indices_BSK,
                                                 const AttentionOptions& options);
Tensor sparse_attention_head_sum_reference(const AttentionState& attention,
                                           const Tensor& indices_BSK);

}  // namespace longhaul::ops
