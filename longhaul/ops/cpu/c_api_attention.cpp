// The functions of include/longhaul/kernels.h: attention, sparse and dense.
#include "longhaul/ops/cpu/c_api.h"

namespace longhaul::cpu {

const char* check_shape(const longhaul_sparse_attention_args& a) {
  if (const char* wrong = check_attention(a.B, a.S, a.L, a.H, a.D, a.K)) return wrong;
  if (a.D % 32 != 0 || a.V % 32 != 0) return "D and V must be multiples of 32";
  if (a.V < 1 || a.V > a.D) return "V must be 1 to D";
  return nullptr;
}

const char* check_shape(const longhaul_sparse_attention_grad_args& a) {
  return check_shape(a.forward);
}

const char* check_shape(const longhaul_sparse_attention_expanded_args& a) {
  if (const char* wrong = check_attention(a.B, a.S, a.L, a.H, a.D, a.K)) return wrong;
  if (a.D % 32 != 0 || a.V % 32 != 0) return "D and V must be multiples of 32";
  if (a.V < 1) return "V must be at least 1";
  if (a.key_stride < a.D || a.value_stride < a.V) {
    return "key_stride and value_stride must be at least D and V";
  }
  return nullptr;
}

const char* check_shape(const longhaul_sparse_attention_expanded_grad_args& a) {
  return check_shape(a.forward);
}

const char* check_shape(const longhaul_flash_attention_args& a) {
  if (const char* wrong = check_attention(a.B, a.S, a.L, a.H, a.D, 1)) return wrong;
  if (a.D % 32 != 0 || a.V % 32 != 0) return "D and V must be multiples of 32";
  if (a.V < 1 || (!a.value && a.V > a.D)) return "V must be at least 1, without values at most D";
  if (a.key_heads != 1 && a.key_heads != a.H) return "key_heads must be 1 or H";
  return nullptr;
}

const char* check_shape(const longhaul_flash_attention_grad_args& a) {
  if ((a.forward.value == nullptr) != (a.d_value == nullptr)) {
    return "value and d_value, or none of the two";
  }
  return check_shape(a.forward);
}

const char* check_shape(const longhaul_attention_head_sum_args& a) {
  if (const char* wrong = check_attention(1, a.S, a.L, a.H, a.D, 1)) return wrong;
  if (a.S > 128) return "at most 128 queries";
  if (a.D % 32 != 0) return "D must be a multiple of 32";
  if (a.key_heads != 1 && a.key_heads != a.H) return "key_heads must be 1 or H";
  return nullptr;
}

}  // namespace longhaul::cpu

using longhaul::cpu::bytes_of;
using longhaul::cpu::check;
using longhaul::cpu::kernels;
using longhaul::cpu::run;

extern "C" {

size_t longhaul_sparse_attention_workspace(const longhaul_sparse_attention_args* args) {
  return bytes_of(*args, kernels().sparse_attention_workspace);
}

const char* longhaul_sparse_attention(const longhaul_sparse_attention_args* args, void* workspace) {
  return run(*args, workspace, kernels().sparse_attention);
}

size_t longhaul_sparse_attention_head_sum_workspace(const longhaul_sparse_attention_args* args) {
  return bytes_of(*args, kernels().sparse_attention_head_sum_workspace);
}

const char* longhaul_sparse_attention_head_sum(const longhaul_sparse_attention_args* args,
                                               void* workspace) {
  if (const char* wrong = check(*args)) return wrong;
  if (!args->head_sum) return "head_sum is what is written";
  kernels().sparse_attention_head_sum(*args, workspace);
  return nullptr;
}

size_t longhaul_sparse_attention_grad_workspace(const longhaul_sparse_attention_grad_args* args) {
  return bytes_of(*args, kernels().sparse_attention_grad_workspace);
}

const char* longhaul_sparse_attention_grad(const longhaul_sparse_attention_grad_args* args,
                                           void* workspace) {
  return run(*args, workspace, kernels().sparse_attention_grad);
}

size_t longhaul_sparse_attention_expanded_workspace(
    const longhaul_sparse_attention_expanded_args* args) {
  return bytes_of(*args, kernels().sparse_attention_expanded_workspace);
}

const char* longhaul_sparse_attention_expanded(const longhaul_sparse_attention_expanded_args* args,
                                               void* workspace) {
  return run(*args, workspace, kernels().sparse_attention_expanded);
}

size_t longhaul_sparse_attention_expanded_grad_workspace(
    const longhaul_sparse_attention_expanded_grad_args* args) {
  return bytes_of(*args, kernels().sparse_attention_expanded_grad_workspace);
}

const char* longhaul_sparse_attention_expanded_grad(
    const longhaul_sparse_attention_expanded_grad_args* args, void* workspace) {
  return run(*args, workspace, kernels().sparse_attention_expanded_grad);
}

size_t longhaul_flash_attention_workspace(const longhaul_flash_attention_args* args) {
  return bytes_of(*args, kernels().flash_attention_workspace);
}

const char* longhaul_flash_attention(const longhaul_flash_attention_args* args, void* workspace) {
  return run(*args, workspace, kernels().flash_attention);
}

size_t longhaul_flash_attention_grad_workspace(const longhaul_flash_attention_grad_args* args) {
  return bytes_of(*args, kernels().flash_attention_grad_workspace);
}

const char* longhaul_flash_attention_grad(const longhaul_flash_attention_grad_args* args,
                                          void* workspace) {
  return run(*args, workspace, kernels().flash_attention_grad);
}

size_t longhaul_attention_head_sum_workspace(const longhaul_attention_head_sum_args* args) {
  return bytes_of(*args, kernels().attention_head_sum_workspace);
}

const char* longhaul_attention_head_sum(const longhaul_attention_head_sum_args* args,
                                        void* workspace) {
  return run(*args, workspace, kernels().attention_head_sum);
}

}  // extern "C"
