// The functions of include/longhaul/kernels.h: the lightning indexer and its losses.
#include "longhaul/ops/cpu/c_api.h"

namespace longhaul::cpu {

const char* check_shape(const longhaul_lightning_indexer_args& a) {
  if (const char* wrong = check_attention(a.B, a.S, a.L, a.H, a.D, a.K)) return wrong;
  if (a.dtype == LONGHAUL_BFLOAT16 && a.D % 2 != 0) return "D must be even for bf16";
  return nullptr;
}

const char* check_shape(const longhaul_lightning_indexer_grad_args& a) {
  if (const char* wrong = check_attention(a.B, a.S, a.L, a.H, a.D, a.K)) return wrong;
  return a.D % 32 != 0 ? "D must be a multiple of 32" : nullptr;
}

const char* check_shape(const longhaul_indexer_kl_loss_args& a) {
  if (const char* wrong = check_attention(a.B, a.S, a.L, a.H, a.D, a.K)) return wrong;
  if (a.D % 32 != 0) return "D must be a multiple of 32";
  const bool some = a.d_query || a.d_key || a.d_weights;
  if (some && !(a.d_query && a.d_key && a.d_weights)) return "all three gradients or none";
  return nullptr;
}

const char* check_shape(const longhaul_dense_indexer_kl_loss_args& a) {
  if (const char* wrong = check_attention(1, a.S, a.L, a.H, a.D, 1)) return wrong;
  if (a.S > 128) return "at most 128 queries";
  if (a.D % 32 != 0) return "D must be a multiple of 32";
  const bool some = a.d_query || a.d_key || a.d_weights;
  if (some && !(a.d_query && a.d_key && a.d_weights)) return "all three gradients or none";
  if ((a.softmax_max == nullptr) != (a.softmax_sum == nullptr)) {
    return "softmax_max and softmax_sum, or none of the two";
  }
  return nullptr;
}

}  // namespace longhaul::cpu

using longhaul::cpu::bytes_of;
using longhaul::cpu::check;
using longhaul::cpu::kernels;
using longhaul::cpu::run;

extern "C" {

size_t longhaul_lightning_indexer_workspace(const longhaul_lightning_indexer_args* args) {
  return bytes_of(*args, kernels().lightning_indexer_workspace);
}

const char* longhaul_lightning_indexer(const longhaul_lightning_indexer_args* args,
                                       void* workspace) {
  return run(*args, workspace, kernels().lightning_indexer);
}

size_t longhaul_lightning_indexer_grad_workspace(const longhaul_lightning_indexer_grad_args* args) {
  return bytes_of(*args, kernels().lightning_indexer_grad_workspace);
}

const char* longhaul_lightning_indexer_grad(const longhaul_lightning_indexer_grad_args* args,
                                            void* workspace) {
  return run(*args, workspace, kernels().lightning_indexer_grad);
}

size_t longhaul_indexer_kl_loss_workspace(const longhaul_indexer_kl_loss_args* args) {
  return bytes_of(*args, kernels().indexer_kl_loss_workspace);
}

const char* longhaul_indexer_kl_loss(const longhaul_indexer_kl_loss_args* args, void* workspace) {
  return run(*args, workspace, kernels().indexer_kl_loss);
}

size_t longhaul_dense_indexer_kl_loss_workspace(const longhaul_dense_indexer_kl_loss_args* args) {
  return bytes_of(*args, kernels().dense_indexer_kl_loss_workspace);
}

const char* longhaul_dense_indexer_kl_loss(const longhaul_dense_indexer_kl_loss_args* args,
                                           void* workspace) {
  if (const char* wrong = check(*args)) return wrong;
  if (!args->head_sum) return "the loss needs head_sum";
  kernels().dense_indexer_kl_loss(*args, workspace);
  return nullptr;
}

size_t longhaul_dense_indexer_softmax_workspace(const longhaul_dense_indexer_kl_loss_args* args) {
  return bytes_of(*args, kernels().dense_indexer_softmax_workspace);
}

const char* longhaul_dense_indexer_softmax(const longhaul_dense_indexer_kl_loss_args* args,
                                           void* workspace) {
  if (const char* wrong = check(*args)) return wrong;
  if (args->head_sum) return "the softmax takes no head_sum";
  if (args->d_query) return "the softmax has no gradients here";
  if (!args->softmax_max) return "softmax_max and softmax_sum are what is written";
  kernels().dense_indexer_softmax(*args, workspace);
  return nullptr;
}

}  // extern "C"
