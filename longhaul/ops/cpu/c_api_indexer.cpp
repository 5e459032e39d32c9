// The functions of include/longhaul/kernels.h: the lightning indexer and its losses.
#include "longhaul/ops/cpu/c_api.h"

namespace longhaul::cpu {
namespace {

template <typename Args>
const char* check_gradients(const Args& a) {
  const int count = (a.d_query != nullptr) + (a.d_key != nullptr) + (a.d_weights != nullptr);
  if (count == 0 || count == 3) return nullptr;
  return wrong("d_query, d_key and d_weights: expected all three or none, got {} of them", count);
}

}  // namespace

const char* check_shape(const longhaul_lightning_indexer_args& a) {
  if (const char* error = check_attention(a.B, a.S, a.L, a.H, a.D, a.K)) return error;
  const bool odd = a.dtype == LONGHAUL_BFLOAT16 && a.D % 2 != 0;
  return odd ? wrong("D: expected an even number for bf16, got {}", a.D) : nullptr;
}

const char* check_shape(const longhaul_lightning_indexer_grad_args& a) {
  if (const char* error = check_attention(a.B, a.S, a.L, a.H, a.D, a.K)) return error;
  return check_columns(a.D, "D");
}

const char* check_shape(const longhaul_indexer_kl_loss_args& a) {
  if (const char* error = check_attention(a.B, a.S, a.L, a.H, a.D, a.K)) return error;
  if (const char* error = check_columns(a.D, "D")) return error;
  return check_gradients(a);
}

const char* check_shape(const longhaul_dense_indexer_kl_loss_args& a) {
  if (const char* error = check_attention(1, a.S, a.L, a.H, a.D, 1)) return error;
  if (const char* error = check_block(a.S)) return error;
  if (const char* error = check_columns(a.D, "D")) return error;
  if (const char* error = check_gradients(a)) return error;
  if ((a.softmax_max == nullptr) == (a.softmax_sum == nullptr)) return nullptr;
  return wrong("softmax_max and softmax_sum: expected both or none, got {} alone",
               a.softmax_max ? "softmax_max" : "softmax_sum");
}

}  // namespace longhaul::cpu

using longhaul::cpu::bytes_of;
using longhaul::cpu::KernelTable;
using longhaul::cpu::run;
using longhaul::cpu::wrong;

extern "C" {

size_t longhaul_lightning_indexer_workspace(const longhaul_lightning_indexer_args* args) {
  return bytes_of(*args, &KernelTable::lightning_indexer_workspace);
}

const char* longhaul_lightning_indexer(const longhaul_lightning_indexer_args* args,
                                       void* workspace) {
  return run(*args, workspace, &KernelTable::lightning_indexer);
}

size_t longhaul_lightning_indexer_grad_workspace(const longhaul_lightning_indexer_grad_args* args) {
  return bytes_of(*args, &KernelTable::lightning_indexer_grad_workspace);
}

const char* longhaul_lightning_indexer_grad(const longhaul_lightning_indexer_grad_args* args,
                                            void* workspace) {
  return run(*args, workspace, &KernelTable::lightning_indexer_grad);
}

size_t longhaul_indexer_kl_loss_workspace(const longhaul_indexer_kl_loss_args* args) {
  return bytes_of(*args, &KernelTable::indexer_kl_loss_workspace);
}

const char* longhaul_indexer_kl_loss(const longhaul_indexer_kl_loss_args* args, void* workspace) {
  return run(*args, workspace, &KernelTable::indexer_kl_loss);
}

size_t longhaul_dense_indexer_kl_loss_workspace(const longhaul_dense_indexer_kl_loss_args* args) {
  return bytes_of(*args, &KernelTable::dense_indexer_kl_loss_workspace);
}

const char* longhaul_dense_indexer_kl_loss(const longhaul_dense_indexer_kl_loss_args* args,
                                           void* workspace) {
  return run(*args, workspace, &KernelTable::dense_indexer_kl_loss, [&] {
    return args->head_sum ? nullptr : wrong("head_sum: expected an array for the loss, got null");
  });
}

size_t longhaul_dense_indexer_softmax_workspace(const longhaul_dense_indexer_kl_loss_args* args) {
  return bytes_of(*args, &KernelTable::dense_indexer_softmax_workspace);
}

const char* longhaul_dense_indexer_softmax(const longhaul_dense_indexer_kl_loss_args* args,
                                           void* workspace) {
  return run(*args, workspace, &KernelTable::dense_indexer_softmax, [&]() -> const char* {
    if (args->head_sum) return wrong("head_sum: expected null for the softmax, got an array");
    if (args->d_query) return wrong("d_query: expected null for the softmax, got an array");
    return args->softmax_max ? nullptr : wrong("softmax_max: expected an array, got null");
  });
}

}  // extern "C"
