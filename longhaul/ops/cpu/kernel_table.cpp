#include "longhaul/ops/cpu/kernel_table.h"

namespace longhaul::cpu::LONGHAUL_ISA {

extern const KernelTable kTable;
const KernelTable kTable = {
    .lightning_indexer_workspace = lightning_indexer_workspace,
    .lightning_indexer = lightning_indexer,
    .sparse_attention_workspace = sparse_attention_workspace,
    .sparse_attention = sparse_attention,
    .sparse_attention_grad_workspace = sparse_attention_grad_workspace,
    .sparse_attention_grad = sparse_attention_grad,
    .flash_attention_workspace = flash_attention_workspace,
    .flash_attention = flash_attention,
    .flash_attention_grad_workspace = flash_attention_grad_workspace,
    .flash_attention_grad = flash_attention_grad,
    .indexer_kl_loss_workspace = indexer_kl_loss_workspace,
    .indexer_kl_loss = indexer_kl_loss,
    .attention_head_sum_workspace = attention_head_sum_workspace,
    .attention_head_sum = attention_head_sum,
    .dense_indexer_kl_loss_workspace = dense_indexer_kl_loss_workspace,
    .dense_indexer_kl_loss = dense_indexer_kl_loss,
    .peak_flops = peak_flops,
    .rms_norm = rms_norm,
    .rms_norm_grad_workspace = rms_norm_grad_workspace,
    .rms_norm_grad = rms_norm_grad,
    .grouped_matmul_workspace = grouped_matmul_workspace,
    .grouped_matmul = grouped_matmul,
    .grouped_matmul_grad_workspace = grouped_matmul_grad_workspace,
    .grouped_matmul_grad = grouped_matmul_grad,
    .rotary_mul = rotary_mul,
    .swiglu = swiglu,
    .swiglu_grad = swiglu_grad,
    .moe_token_permute = moe_token_permute,
    .moe_token_unpermute = moe_token_unpermute,
    .cross_entropy = cross_entropy,
    .adam_w = adam_w,
    .sum_of_squares_workspace = sum_of_squares_workspace,
    .sum_of_squares = sum_of_squares,
    .moe_gating_top_k_workspace = moe_gating_top_k_workspace,
    .moe_gating_top_k = moe_gating_top_k,
    .moe_gating_top_k_grad = moe_gating_top_k_grad,
};

}  // namespace longhaul::cpu::LONGHAUL_ISA
