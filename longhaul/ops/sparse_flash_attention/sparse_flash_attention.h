// DeepSeek Sparse Attention: attention of each query over its selected keys only (DeepSeek-V3.2
// report, equation 2). The maths, layouts and results of ops/flash_attention, with softmax over
// S_t = indices[t,.]. indices [B, S, K] int32; -1 may stand anywhere in a row and means no key.
// Fused: for absorbed MLA (values are the first columns of a shared key, no value tensor), with
// distinct indices in a row. With delta_h = sum over columns of d_out out:
//   dS = P (d_out . v - delta) scale,   dq += dS k,   dk += dS q,   dv += P d_out
#pragma once

#include "longhaul/ops/flash_attention/flash_attention.h"

namespace longhaul::ops {

AttentionResult sparse_flash_attention(const Tensor& query_BSHD, const Tensor& key,
                                       const Tensor& value, const Tensor& indices_BSK,
                                       const AttentionOptions& options);

// The definition, in plain ATen: masked_attention with the indices as a mask.
AttentionResult sparse_flash_attention_reference(const Tensor& query_BSHD, const Tensor& key,
                                                 const Tensor& value, const Tensor& indices_BSK,
                                                 const AttentionOptions& options);

}  // namespace longhaul::ops
