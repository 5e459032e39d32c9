// What the functions of include/longhaul/kernels.h share: arguments are checked here, once, so that
// the kernels need not. Each family of operators has a file: c_api_<family>.cpp.
#pragma once

#include "include/longhaul/kernels.h"
#include "longhaul/ops/cpu/isa.h"

namespace longhaul::cpu {

inline constexpr const char* kNoDtype = "dtype must be LONGHAUL_FLOAT32 or LONGHAUL_BFLOAT16";

bool is_dtype(const longhaul_dtype& dtype);

// All checks return null, or what is wrong. Of sizes:
const char* check_attention(int64_t B, int64_t S, int64_t L, int64_t H, int64_t D, int64_t K);
const char* check_shape(const longhaul_sparse_attention_args& a);
const char* check_shape(const longhaul_sparse_attention_grad_args& a);
const char* check_shape(const longhaul_sparse_attention_expanded_args& a);
const char* check_shape(const longhaul_sparse_attention_expanded_grad_args& a);
const char* check_shape(const longhaul_flash_attention_args& a);
const char* check_shape(const longhaul_flash_attention_grad_args& a);
const char* check_shape(const longhaul_attention_head_sum_args& a);
const char* check_shape(const longhaul_lightning_indexer_args& a);
const char* check_shape(const longhaul_lightning_indexer_grad_args& a);
const char* check_shape(const longhaul_indexer_kl_loss_args& a);
const char* check_shape(const longhaul_dense_indexer_kl_loss_args& a);
const char* check_shape(const longhaul_grouped_matmul_args& a);
const char* check_shape(const longhaul_grouped_matmul_grad_args& a);
const char* check_shape(const longhaul_moe_gating_top_k_args& a);
const char* check_shape(const longhaul_moe_gating_top_k_grad_args& a);
const char* check_shape(const longhaul_moe_token_permute_args& a);
const char* check_shape(const longhaul_moe_token_unpermute_args& a);
const char* check_shape(const longhaul_rms_norm_args& a);
const char* check_shape(const longhaul_rms_norm_grad_args& a);
const char* check_shape(const longhaul_rotary_mul_args& a);
const char* check_shape(const longhaul_swiglu_args& a);
const char* check_shape(const longhaul_swiglu_grad_args& a);
const char* check_shape(const longhaul_cross_entropy_args& a);
const char* check_shape(const longhaul_adam_w_args& a);
const char* check_shape(const longhaul_sum_of_squares_args& a);

// Of what stands in arrays: keys, groups and rows that exist.
const char* check_indices(const int32_t* indices, int64_t rows, int64_t K, int64_t L);
const char* check_ranges(const int64_t* first_key, const int64_t* last_key, int64_t rows,
                         int64_t L);
const char* check_counts(const int64_t* counts, int64_t M, int64_t E);
const char* check_inverse(const int64_t* inverse, int64_t rows);
const char* check_contents(const longhaul_moe_gating_top_k_args& a);
const char* check_contents(const longhaul_cross_entropy_args& a);

// Kernels whose arrays hold keys, groups or rows; most hold only numbers.
template <typename Args>
const char* check_contents(const Args& a) {
  if constexpr (requires { a.forward; }) {
    return check_contents(a.forward);
  } else if constexpr (requires { a.first_key; }) {
    int64_t rows = a.S;
    if constexpr (requires { a.B; }) rows *= a.B;
    return check_ranges(a.first_key, a.last_key, rows, a.L);
  } else if constexpr (requires { a.indices; }) {
    return check_indices(a.indices, a.B * a.S, a.K, a.L);
  } else if constexpr (requires { a.counts; }) {
    return check_counts(a.counts, a.M, a.E);
  } else if constexpr (requires { a.inverse; }) {
    return check_inverse(a.inverse, a.T * a.k);
  }
  return nullptr;
}

// Whatever needs no array.
template <typename Args>
const char* check_sizes(const Args& a) {
  if constexpr (requires { a.dtype; }) {
    if (!is_dtype(a.dtype)) return kNoDtype;
  } else if constexpr (requires { a.forward.dtype; }) {
    if (!is_dtype(a.forward.dtype)) return kNoDtype;
  }
  return check_shape(a);
}

template <typename Args>
const char* check(const Args& a) {
  if (const char* wrong = check_sizes(a)) return wrong;
  return check_contents(a);
}

// None for what the kernel would refuse.
template <typename Args>
size_t bytes_of(const Args& a, size_t (*workspace)(const Args&)) {
  return check_sizes(a) ? 0 : workspace(a);
}

// Calls the kernel if nothing is wrong; returns what is.
template <typename Args>
const char* run(const Args& a, void* workspace, void (*kernel)(const Args&, void*)) {
  if (const char* wrong = check(a)) return wrong;
  kernel(a, workspace);
  return nullptr;
}
template <typename Args>
const char* run(const Args& a, void (*kernel)(const Args&)) {
  if (const char* wrong = check(a)) return wrong;
  kernel(a);
  return nullptr;
}

}  // namespace longhaul::cpu
