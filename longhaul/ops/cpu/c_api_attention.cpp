// The functions of include/longhaul/kernels.h: attention, sparse and dense.
#include "longhaul/ops/cpu/c_api.h"

namespace longhaul::cpu {
namespace {

const char* check_value_columns(int64_t D, int64_t V) {
  if (const char* error = check_columns(D, "D")) return error;
  return check_columns(V, "V");
}

const char* check_head_sum(const float* head_sum) {
  return head_sum ? nullptr : wrong("head_sum: expected an array, got null");
}

}  // namespace

const char* check_shape(const longhaul_sparse_attention_args& a) {
  if (const char* error = check_attention(a.B, a.S, a.L, a.H, a.D, a.K)) return error;
  if (const char* error = check_value_columns(a.D, a.V)) return error;
  return a.V <= a.D ? nullptr : wrong("V: expected at most {} (D), got {}", a.D, a.V);
}

const char* check_shape(const longhaul_sparse_attention_grad_args& a) {
  return check_shape(a.forward);
}

const char* check_shape(const longhaul_sparse_attention_expanded_args& a) {
  if (const char* error = check_attention(a.B, a.S, a.L, a.H, a.D, a.K)) return error;
  if (const char* error = check_value_columns(a.D, a.V)) return error;
  if (const char* error = check_at_least(a.D, a.key_stride, "key_stride")) return error;
  return check_at_least(a.V, a.value_stride, "value_stride");
}

const char* check_shape(const longhaul_sparse_attention_expanded_grad_args& a) {
  return check_shape(a.forward);
}

const char* check_shape(const longhaul_flash_attention_args& a) {
  if (const char* error = check_attention(a.B, a.S, a.L, a.H, a.D, 1)) return error;
  if (const char* error = check_value_columns(a.D, a.V)) return error;
  if (!a.value && a.V > a.D) {
    return wrong("V: expected at most {} (D) without values, got {}", a.D, a.V);
  }
  return check_key_heads(a.key_heads, a.H);
}

const char* check_shape(const longhaul_flash_attention_grad_args& a) {
  if ((a.forward.value == nullptr) != (a.d_value == nullptr)) {
    return wrong("d_value: expected {} value, got {}",
                 a.forward.value ? "one, with a" : "none, without a", a.d_value ? "one" : "null");
  }
  return check_shape(a.forward);
}

const char* check_shape(const longhaul_attention_head_sum_args& a) {
  if (const char* error = check_attention(1, a.S, a.L, a.H, a.D, 1)) return error;
  if (const char* error = check_block(a.S)) return error;
  if (const char* error = check_columns(a.D, "D")) return error;
  return check_key_heads(a.key_heads, a.H);
}

}  // namespace longhaul::cpu

using longhaul::cpu::bytes_of;
using longhaul::cpu::check_head_sum;
using longhaul::cpu::KernelTable;
using longhaul::cpu::run;
using longhaul::cpu::wrong;

extern "C" {

size_t longhaul_sparse_attention_workspace(const longhaul_sparse_attention_args* args) {
  return bytes_of(*args, &KernelTable::sparse_attention_workspace);
}

const char* longhaul_sparse_attention(const longhaul_sparse_attention_args* args, void* workspace) {
  return run(*args, workspace, &KernelTable::sparse_attention);
}

size_t longhaul_sparse_attention_head_sum_workspace(const longhaul_sparse_attention_args* args) {
  return bytes_of(*args, &KernelTable::sparse_attention_head_sum_workspace);
}

const char* longhaul_sparse_attention_head_sum(const longhaul_sparse_attention_args* args,
                                               void* workspace) {
  return run(*args, workspace, &KernelTable::sparse_attention_head_sum,
             [&] { return check_head_sum(args->head_sum); });
}

size_t longhaul_sparse_attention_grad_workspace(const longhaul_sparse_attention_grad_args* args) {
  return bytes_of(*args, &KernelTable::sparse_attention_grad_workspace);
}

const char* longhaul_sparse_attention_grad(const longhaul_sparse_attention_grad_args* args,
                                           void* workspace) {
  return run(*args, workspace, &KernelTable::sparse_attention_grad);
}

size_t longhaul_sparse_attention_expanded_workspace(
    const longhaul_sparse_attention_expanded_args* args) {
  return bytes_of(*args, &KernelTable::sparse_attention_expanded_workspace);
}

const char* longhaul_sparse_attention_expanded(const longhaul_sparse_attention_expanded_args* args,
                                               void* workspace) {
  return run(*args, workspace, &KernelTable::sparse_attention_expanded);
}

size_t longhaul_sparse_attention_expanded_head_sum_workspace(
    const longhaul_sparse_attention_expanded_args* args) {
  return bytes_of(*args, &KernelTable::sparse_attention_expanded_head_sum_workspace);
}

const char* longhaul_sparse_attention_expanded_head_sum(
    const longhaul_sparse_attention_expanded_args* args, void* workspace) {
  return run(*args, workspace, &KernelTable::sparse_attention_expanded_head_sum,
             [&] { return check_head_sum(args->head_sum); });
}

size_t longhaul_sparse_attention_expanded_grad_workspace(
    const longhaul_sparse_attention_expanded_grad_args* args) {
  return bytes_of(*args, &KernelTable::sparse_attention_expanded_grad_workspace);
}

const char* longhaul_sparse_attention_expanded_grad(
    const longhaul_sparse_attention_expanded_grad_args* args, void* workspace) {
  return run(*args, workspace, &KernelTable::sparse_attention_expanded_grad);
}

size_t longhaul_flash_attention_workspace(const longhaul_flash_attention_args* args) {
  return bytes_of(*args, &KernelTable::flash_attention_workspace);
}

const char* longhaul_flash_attention(const longhaul_flash_attention_args* args, void* workspace) {
  return run(*args, workspace, &KernelTable::flash_attention);
}

size_t longhaul_flash_attention_grad_workspace(const longhaul_flash_attention_grad_args* args) {
  return bytes_of(*args, &KernelTable::flash_attention_grad_workspace);
}

const char* longhaul_flash_attention_grad(const longhaul_flash_attention_grad_args* args,
                                          void* workspace) {
  return run(*args, workspace, &KernelTable::flash_attention_grad);
}

size_t longhaul_attention_head_sum_workspace(const longhaul_attention_head_sum_args* args) {
  return bytes_of(*args, &KernelTable::attention_head_sum_workspace);
}

const char* longhaul_attention_head_sum(const longhaul_attention_head_sum_args* args,
                                        void* workspace) {
  return run(*args, workspace, &KernelTable::attention_head_sum);
}

}  // extern "C"
