// The operators of include/longhaul/kernels.h: each takes its arguments from a Case, calls the
// kernel and, where there is one, its gradient with the results, and checks what comes out.
#pragma once

#include "tests/fuzz/case.h"

namespace longhaul::fuzz {

void lightning_indexer(Case& c);
void lightning_indexer_grad(Case& c);
void sparse_attention(Case& c);
void sparse_attention_expanded(Case& c);
void flash_attention(Case& c);
void indexer_kl_loss(Case& c);
void attention_head_sum(Case& c);
void dense_indexer_kl_loss(Case& c);
void rms_norm(Case& c);
void rotary_mul(Case& c);
void swiglu(Case& c);
void cross_entropy(Case& c);
void adam_w(Case& c);
void sum_of_squares(Case& c);
void grouped_matmul(Case& c);
void grouped_matmul_grad(Case& c);
void moe_token_permute(Case& c);
void moe_token_unpermute(Case& c);
void moe_gating_top_k(Case& c);

inline constexpr void (*kOperators[])(Case&) = {lightning_indexer,
                                                lightning_indexer_grad,
                                                sparse_attention,
                                                sparse_attention_expanded,
                                                flash_attention,
                                                indexer_kl_loss,
                                                attention_head_sum,
                                                dense_indexer_kl_loss,
                                                rms_norm,
                                                rotary_mul,
                                                swiglu,
                                                cross_entropy,
                                                adam_w,
                                                sum_of_squares,
                                                grouped_matmul,
                                                grouped_matmul_grad,
                                                moe_token_permute,
                                                moe_token_unpermute,
                                                moe_gating_top_k};

}  // namespace longhaul::fuzz
