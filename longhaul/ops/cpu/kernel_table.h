// The kernels of one instruction set. Each of their sources is compiled once for each instruction
// set into the namespace that LONGHAUL_ISA names; the table is how the rest of the program reaches
// them (see isa.h).
#pragma once

#include "include/longhaul/kernels.h"

namespace longhaul::cpu {

struct KernelTable {
  size_t (*lightning_indexer_workspace)(const longhaul_lightning_indexer_args&);
  void (*lightning_indexer)(const longhaul_lightning_indexer_args&, void*);
  size_t (*lightning_indexer_grad_workspace)(const longhaul_lightning_indexer_grad_args&);
  void (*lightning_indexer_grad)(const longhaul_lightning_indexer_grad_args&, void*);
  size_t (*sparse_attention_workspace)(const longhaul_sparse_attention_args&);
  void (*sparse_attention)(const longhaul_sparse_attention_args&, void*);
  size_t (*sparse_attention_head_sum_workspace)(const longhaul_sparse_attention_args&);
  void (*sparse_attention_head_sum)(const longhaul_sparse_attention_args&, void*);
  size_t (*sparse_attention_grad_workspace)(const longhaul_sparse_attention_grad_args&);
  void (*sparse_attention_grad)(const longhaul_sparse_attention_grad_args&, void*);
  size_t (*sparse_attention_expanded_workspace)(const longhaul_sparse_attention_expanded_args&);
  void (*sparse_attention_expanded)(const longhaul_sparse_attention_expanded_args&, void*);
  size_t (*sparse_attention_expanded_head_sum_workspace)(
      const longhaul_sparse_attention_expanded_args&);
  void (*sparse_attention_expanded_head_sum)(const longhaul_sparse_attention_expanded_args&, void*);
  size_t (*sparse_attention_expanded_grad_workspace)(
      const longhaul_sparse_attention_expanded_grad_args&);
  void (*sparse_attention_expanded_grad)(const longhaul_sparse_attention_expanded_grad_args&,
                                         void*);
  size_t (*flash_attention_workspace)(const longhaul_flash_attention_args&);
  void (*flash_attention)(const longhaul_flash_attention_args&, void*);
  size_t (*flash_attention_grad_workspace)(const longhaul_flash_attention_grad_args&);
  void (*flash_attention_grad)(const longhaul_flash_attention_grad_args&, void*);
  size_t (*indexer_kl_loss_workspace)(const longhaul_indexer_kl_loss_args&);
  void (*indexer_kl_loss)(const longhaul_indexer_kl_loss_args&, void*);
  size_t (*attention_head_sum_workspace)(const longhaul_attention_head_sum_args&);
  void (*attention_head_sum)(const longhaul_attention_head_sum_args&, void*);
  size_t (*dense_indexer_kl_loss_workspace)(const longhaul_dense_indexer_kl_loss_args&);
  void (*dense_indexer_kl_loss)(const longhaul_dense_indexer_kl_loss_args&, void*);
  size_t (*dense_indexer_softmax_workspace)(const longhaul_dense_indexer_kl_loss_args&);
  void (*dense_indexer_softmax)(const longhaul_dense_indexer_kl_loss_args&, void*);
  double (*peak_flops)(longhaul_dtype, double seconds);
  void (*rms_norm)(const longhaul_rms_norm_args&);
  size_t (*rms_norm_grad_workspace)(const longhaul_rms_norm_grad_args&);
  void (*rms_norm_grad)(const longhaul_rms_norm_grad_args&, void*);
  size_t (*grouped_matmul_workspace)(const longhaul_grouped_matmul_args&);
  void (*grouped_matmul)(const longhaul_grouped_matmul_args&, void*);
  size_t (*grouped_matmul_grad_workspace)(const longhaul_grouped_matmul_grad_args&);
  void (*grouped_matmul_grad)(const longhaul_grouped_matmul_grad_args&, void*);
  void (*rotary_mul)(const longhaul_rotary_mul_args&);
  void (*swiglu)(const longhaul_swiglu_args&);
  void (*swiglu_grad)(const longhaul_swiglu_grad_args&);
  void (*moe_token_permute)(const longhaul_moe_token_permute_args&);
  void (*moe_token_unpermute)(const longhaul_moe_token_unpermute_args&);
  void (*cross_entropy)(const longhaul_cross_entropy_args&);
  void (*adam_w)(const longhaul_adam_w_args&);
  size_t (*sum_of_squares_workspace)(const longhaul_sum_of_squares_args&);
  void (*sum_of_squares)(const longhaul_sum_of_squares_args&, void*);
  size_t (*moe_gating_top_k_workspace)(const longhaul_moe_gating_top_k_args&);
  void (*moe_gating_top_k)(const longhaul_moe_gating_top_k_args&, void*);
  void (*moe_gating_top_k_grad)(const longhaul_moe_gating_top_k_grad_args&);
};

#ifdef LONGHAUL_ISA
namespace LONGHAUL_ISA {
size_t lightning_indexer_workspace(const longhaul_lightning_indexer_args&);
void lightning_indexer(const longhaul_lightning_indexer_args&, void* workspace);
size_t lightning_indexer_grad_workspace(const longhaul_lightning_indexer_grad_args&);
void lightning_indexer_grad(const longhaul_lightning_indexer_grad_args&, void* workspace);
size_t sparse_attention_workspace(const longhaul_sparse_attention_args&);
void sparse_attention(const longhaul_sparse_attention_args&, void* workspace);
size_t sparse_attention_head_sum_workspace(const longhaul_sparse_attention_args&);
void sparse_attention_head_sum(const longhaul_sparse_attention_args&, void* workspace);
size_t sparse_attention_grad_workspace(const longhaul_sparse_attention_grad_args&);
void sparse_attention_grad(const longhaul_sparse_attention_grad_args&, void* workspace);
size_t sparse_attention_expanded_workspace(const longhaul_sparse_attention_expanded_args&);
void sparse_attention_expanded(const longhaul_sparse_attention_expanded_args&, void* workspace);
size_t sparse_attention_expanded_head_sum_workspace(const longhaul_sparse_attention_expanded_args&);
void sparse_attention_expanded_head_sum(const longhaul_sparse_attention_expanded_args&,
                                        void* workspace);
size_t sparse_attention_expanded_grad_workspace(
    const longhaul_sparse_attention_expanded_grad_args&);
void sparse_attention_expanded_grad(const longhaul_sparse_attention_expanded_grad_args&,
                                    void* workspace);
size_t flash_attention_workspace(const longhaul_flash_attention_args&);
void flash_attention(const longhaul_flash_attention_args&, void* workspace);
size_t flash_attention_grad_workspace(const longhaul_flash_attention_grad_args&);
void flash_attention_grad(const longhaul_flash_attention_grad_args&, void* workspace);
size_t indexer_kl_loss_workspace(const longhaul_indexer_kl_loss_args&);
void indexer_kl_loss(const longhaul_indexer_kl_loss_args&, void* workspace);
size_t attention_head_sum_workspace(const longhaul_attention_head_sum_args&);
void attention_head_sum(const longhaul_attention_head_sum_args&, void* workspace);
size_t dense_indexer_kl_loss_workspace(const longhaul_dense_indexer_kl_loss_args&);
void dense_indexer_kl_loss(const longhaul_dense_indexer_kl_loss_args&, void* workspace);
size_t dense_indexer_softmax_workspace(const longhaul_dense_indexer_kl_loss_args&);
void dense_indexer_softmax(const longhaul_dense_indexer_kl_loss_args&, void* workspace);
double peak_flops(longhaul_dtype, double seconds);
void rms_norm(const longhaul_rms_norm_args&);
size_t rms_norm_grad_workspace(const longhaul_rms_norm_grad_args&);
void rms_norm_grad(const longhaul_rms_norm_grad_args&, void* workspace);
size_t grouped_matmul_workspace(const longhaul_grouped_matmul_args&);
void grouped_matmul(const longhaul_grouped_matmul_args&, void* workspace);
size_t grouped_matmul_grad_workspace(const longhaul_grouped_matmul_grad_args&);
void grouped_matmul_grad(const longhaul_grouped_matmul_grad_args&, void* workspace);
void rotary_mul(const longhaul_rotary_mul_args&);
void swiglu(const longhaul_swiglu_args&);
void swiglu_grad(const longhaul_swiglu_grad_args&);
void moe_token_permute(const longhaul_moe_token_permute_args&);
void moe_token_unpermute(const longhaul_moe_token_unpermute_args&);
void cross_entropy(const longhaul_cross_entropy_args&);
void adam_w(const longhaul_adam_w_args&);
size_t sum_of_squares_workspace(const longhaul_sum_of_squares_args&);
void sum_of_squares(const longhaul_sum_of_squares_args&, void* workspace);
size_t moe_gating_top_k_workspace(const longhaul_moe_gating_top_k_args&);
void moe_gating_top_k(const longhaul_moe_gating_top_k_args&, void* workspace);
void moe_gating_top_k_grad(const longhaul_moe_gating_top_k_grad_args&);
}  // namespace LONGHAUL_ISA
#endif

}  // namespace longhaul::cpu
