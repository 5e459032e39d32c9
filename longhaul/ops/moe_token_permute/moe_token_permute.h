// Brings the tokens of each expert together and back.
//   permuted[j] = tokens[order[j] / k],   order = stable sort of the flattened choice by expert
//   out[t] = sum over i of probs[t,i] * permuted[inverse[t,i]]
// The order is stable, so that within an expert tokens keep their order and sums are deterministic.
// A choice of E (one past the last expert) means nowhere: these rows come last and are not counted.
// T tokens, k choices a token, D features. Gradients, with rows those of a token's choices:
//   d_tokens[t] = sum over i of d_permuted[inverse[t,i]]
//   d_permuted[inverse[t,i]] = probs[t,i] d_out[t],   d_probs[t,i] = d_out[t] . row of (t, i)
#pragma once

#include <ATen/core/Tensor.h>

#include "longhaul/ops/kernel.h"

namespace longhaul::ops {

using at::Tensor;

struct TokenOrder {
  Tensor order;     // [T * k] int64: the flat choice that stands at row j
  Tensor inverse;   // [T, k] int64: the row of choice (t, i)
  Tensor counts_E;  // [E] int64: rows of each expert
};

// experts [T, k] int64 with values in 0 .. num_experts; others are an error. Rows are counted on
// the host, so that this waits for another device.
TokenOrder sort_by_expert(const Tensor& experts_TK, int64_t num_experts);

// [T, D] to [T * k, D]. Fused: fp32 and bf16 on the CPU; its gradient is summed in fp32.
Tensor moe_token_permute(const Tensor& tokens_TD, const TokenOrder& order,
                         Kernel kernel = Kernel::kReference);

// [T * k, D] and probs [T, k] to [T, D], in the dtype of `permuted`; summed in fp32 or wider.
// Fused: fp32 and bf16 on the CPU, probs as fp32.
Tensor moe_token_unpermute(const Tensor& permuted, const Tensor& probs_TK, const TokenOrder& order,
                           Kernel kernel = Kernel::kReference);

// The gradients without autograd, for callers that bring their own, by the kernels' inverse [T, k]
// alone: fp32 and bf16 on the CPU.
Tensor moe_token_permute_grad(const Tensor& d_permuted, const Tensor& inverse_TK);

// Without probs (undefined: all 1) d_probs is undefined.
struct UnpermuteGradients {
  Tensor d_permuted, d_probs_TK;
};
UnpermuteGradients moe_token_unpermute_grad(const Tensor& d_tokens_TD, const Tensor& permuted,
                                            const Tensor& probs_TK, const Tensor& inverse_TK);

// The definitions, in plain ATen.
Tensor moe_token_permute_reference(const Tensor& tokens_TD, const TokenOrder& order);
Tensor moe_token_unpermute_reference(const Tensor& permuted, const Tensor& probs_TK,
                                     const TokenOrder& order);

}  // namespace longhaul::ops
