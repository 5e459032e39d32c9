// What the functions of include/longhaul/kernels.h share: arguments are checked here, once, so that
// the kernels need not, and no exception leaves them. Each family of operators has a file:
// c_api_<family>.cpp.
#pragma once

#include <fmt/format.h>

#include <exception>
#include <string>

#include "include/longhaul/kernels.h"
#include "longhaul/ops/cpu/isa.h"

namespace longhaul::cpu {

// Keeps a text as the calling thread's error until its next one.
const char* keep_error(std::string text);

// "expected ..., got ...", kept.
template <typename... Args>
const char* wrong(fmt::format_string<Args...> format, Args&&... args) {
  return keep_error(fmt::format(format, std::forward<Args>(args)...));
}

// All checks return null, or what is wrong. Of sizes:
const char* check_dtype(const longhaul_dtype& dtype);
const char* check_at_least(int64_t lowest, int64_t value, const char* name);
const char* check_columns(int64_t value, const char* name);  // a positive multiple of 32
const char* check_key_heads(int64_t key_heads, int64_t H);
const char* check_block(int64_t S);  // queries of a dense loss
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
    if (const char* error = check_dtype(a.dtype)) return error;
  } else if constexpr (requires { a.forward.dtype; }) {
    if (const char* error = check_dtype(a.forward.dtype)) return error;
  }
  if constexpr (requires { a.B* a.S; }) {
    // So that the number of rows has room in an int64.
    constexpr int64_t kMostRows = int64_t{1} << 40;
    if (a.B > 0 && a.S > kMostRows / a.B) {
      return wrong("B x S: expected at most {} rows, got {} x {}", kMostRows, a.B, a.S);
    }
  }
  return check_shape(a);
}

template <typename Args>
const char* check(const Args& a) {
  if (const char* error = check_sizes(a)) return error;
  return check_contents(a);
}

// What `f` returns, or the text of what it throws: kernels() does for a wrong LONGHAUL_ISA.
template <typename F>
const char* without_exceptions(const F& f) noexcept {
  try {
    return f();
  } catch (const std::exception& error) {
    return keep_error(error.what());
  }
}

// None for what the kernel would refuse.
template <typename Args>
size_t bytes_of(const Args& a, size_t (*KernelTable::*workspace)(const Args&)) noexcept {
  size_t bytes = 0;
  without_exceptions([&] {
    const char* error = check_sizes(a);
    if (!error) bytes = (kernels().*workspace)(a);
    return error;
  });
  return bytes;
}

// Calls the kernel if nothing is wrong; returns what is. `also` checks what check() does not know.
template <typename Args, typename... Check>
const char* run(const Args& a, void* workspace, void (*KernelTable::*kernel)(const Args&, void*),
                const Check&... also) noexcept {
  return without_exceptions([&]() -> const char* {
    if (const char* error = check(a)) return error;
    for (const char* error : std::initializer_list<const char*>{also()..., nullptr}) {
      if (error) return error;
    }
    (kernels().*kernel)(a, workspace);
    return nullptr;
  });
}
template <typename Args>
const char* run(const Args& a, void (*KernelTable::*kernel)(const Args&)) noexcept {
  return without_exceptions([&]() -> const char* {
    if (const char* error = check(a)) return error;
    (kernels().*kernel)(a);
    return nullptr;
  });
}

}  // namespace longhaul::cpu
