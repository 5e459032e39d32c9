// The functions of include/longhaul/kernels.h: arguments are checked here, once, so that the
// kernels need not.
#include <atomic>
#include <cstring>

#include "include/longhaul/kernels.h"
#include "longhaul/ops/cpu/isa.h"

namespace longhaul::cpu {
namespace {

constexpr int64_t kMaxKeys = int64_t{1} << 30;  // indices are int32
constexpr const char* kNoDtype = "dtype must be LONGHAUL_FLOAT32 or LONGHAUL_BFLOAT16";

// By its bytes: C lets any number stand there, C++ none but the two.
bool is_dtype(const longhaul_dtype& dtype) {
  int32_t value;
  static_assert(sizeof value == sizeof dtype);
  std::memcpy(&value, &dtype, sizeof value);
  return value == LONGHAUL_FLOAT32 || value == LONGHAUL_BFLOAT16;
}

const char* check_attention(int64_t B, int64_t S, int64_t L, int64_t H, int64_t D, int64_t K) {
  if (B < 0 || S < 0 || L < 0) return "B, S and L must not be negative";
  if (L > kMaxKeys) return "at most 2^30 keys";
  if (H < 1 || H > 128) return "H must be 1 to 128";
  if (D < 1) return "D must be at least 1";
  if (K < 1) return "K must be at least 1";
  return nullptr;
}

const char* check_indices(const int32_t* indices, int64_t rows, int64_t K, int64_t L) {
  std::atomic<bool> wrong = false;
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    int32_t highest = -1, lowest = 0;
    for (int64_t i = row * K; i < (row + 1) * K; ++i) {
      lowest = indices[i] < lowest ? indices[i] : lowest;
      highest = indices[i] > highest ? indices[i] : highest;
    }
    if (lowest < -1 || highest >= L) wrong = true;
  }
  return wrong ? "an index is outside -1 .. L - 1" : nullptr;
}

const char* check_ranges(const int64_t* first_key, const int64_t* last_key, int64_t rows,
                         int64_t L) {
  for (int64_t i = 0; i < rows; ++i) {
    const bool none = first_key[i] > last_key[i];
    if (!none && (first_key[i] < 0 || last_key[i] >= L)) {
      return "first_key and last_key must lie in 0 .. L - 1";
    }
  }
  return nullptr;
}

const char* check_shape(const longhaul_lightning_indexer_args& a) {
  if (const char* wrong = check_attention(a.B, a.S, a.L, a.H, a.D, a.K)) return wrong;
  if (a.dtype == LONGHAUL_BFLOAT16 && a.D % 2 != 0) return "D must be even for bf16";
  return nullptr;
}

const char* check_shape(const longhaul_lightning_indexer_grad_args& a) {
  if (const char* wrong = check_attention(a.B, a.S, a.L, a.H, a.D, a.K)) return wrong;
  return a.D % 32 != 0 ? "D must be a multiple of 32" : nullptr;
}

const char* check_shape(const longhaul_sparse_attention_args& a) {
  if (const char* wrong = check_attention(a.B, a.S, a.L, a.H, a.D, a.K)) return wrong;
  if (a.D % 32 != 0 || a.V % 32 != 0) return "D and V must be multiples of 32";
  if (a.V < 1 || a.V > a.D) return "V must be 1 to D";
  return nullptr;
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

const char* check_shape(const longhaul_indexer_kl_loss_args& a) {
  if (const char* wrong = check_attention(a.B, a.S, a.L, a.H, a.D, a.K)) return wrong;
  if (a.D % 32 != 0) return "D must be a multiple of 32";
  const bool some = a.d_query || a.d_key || a.d_weights;
  if (some && !(a.d_query && a.d_key && a.d_weights)) return "all three gradients or none";
  return nullptr;
}

const char* check_shape(const longhaul_attention_head_sum_args& a) {
  if (const char* wrong = check_attention(1, a.S, a.L, a.H, a.D, 1)) return wrong;
  if (a.S > 128) return "at most 128 queries";
  if (a.D % 32 != 0) return "D must be a multiple of 32";
  if (a.key_heads != 1 && a.key_heads != a.H) return "key_heads must be 1 or H";
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

const char* check_shape(const longhaul_rms_norm_args& a) {
  if (a.rows < 0) return "rows must not be negative";
  return a.D < 1 ? "D must be at least 1" : nullptr;
}

const char* check_shape(const longhaul_rms_norm_grad_args& a) {
  if (a.rows < 0) return "rows must not be negative";
  return a.D < 1 ? "D must be at least 1" : nullptr;
}

const char* check_groups(int64_t M, int64_t N, int64_t K, int64_t E) {
  if (M < 0 || E < 0) return "M and E must not be negative";
  return N < 1 || K < 1 ? "N and K must be at least 1" : nullptr;
}

// Groups may not hold more rows than there are.
const char* check_counts(const int64_t* counts, int64_t M, int64_t E) {
  int64_t rows = 0;
  for (int64_t e = 0; e < E; ++e) {
    if (counts[e] < 0) return "counts must not be negative";
    if (counts[e] > M - rows) return "counts add up to more than M";
    rows += counts[e];
  }
  return nullptr;
}

const char* check_shape(const longhaul_grouped_matmul_args& a) {
  return check_groups(a.M, a.N, a.K, a.E);
}

const char* check_shape(const longhaul_grouped_matmul_grad_args& a) {
  return check_groups(a.M, a.N, a.K, a.E);
}

const char* check_shape(const longhaul_rotary_mul_args& a) {
  if (a.T < 0 || a.H < 0) return "T and H must not be negative";
  return a.R < 0 || a.R % 2 != 0 ? "R must be even" : nullptr;
}

const char* check_shape(const longhaul_swiglu_args& a) {
  return a.rows < 0 || a.D < 0 ? "rows and D must not be negative" : nullptr;
}

const char* check_shape(const longhaul_swiglu_grad_args& a) {
  return a.rows < 0 || a.D < 0 ? "rows and D must not be negative" : nullptr;
}

// Of T * k choices among as many rows.
const char* check_choices(int64_t T, int64_t k, int64_t D) {
  return T < 0 || k < 0 || D < 0 ? "T, k and D must not be negative" : nullptr;
}

const char* check_inverse(const int64_t* inverse, int64_t rows) {
  for (int64_t i = 0; i < rows; ++i) {
    if (inverse[i] < 0 || inverse[i] >= rows) return "inverse must lie in 0 .. T k - 1";
  }
  return nullptr;
}

const char* check_shape(const longhaul_moe_token_permute_args& a) {
  if ((a.rows == nullptr) != (a.d_probs == nullptr)) return "rows and d_probs, or none of the two";
  return check_choices(a.T, a.k, a.D);
}

const char* check_shape(const longhaul_moe_token_unpermute_args& a) {
  return check_choices(a.T, a.k, a.D);
}

const char* check_shape(const longhaul_cross_entropy_args& a) {
  return a.rows < 0 || a.V < 0 ? "rows and V must not be negative" : nullptr;
}

const char* check_shape(const longhaul_adam_w_args& a) {
  for (int64_t i = 0; i < a.count; ++i) {
    if (a.parameters[i].n < 0) return "n must not be negative";
    if (a.parameters[i].step < 1) return "step must be at least 1";
  }
  return nullptr;
}

const char* check_shape(const longhaul_sum_of_squares_args& a) {
  for (int64_t i = 0; i < a.count; ++i) {
    if (!is_dtype(a.arrays[i].dtype)) return kNoDtype;
    if (a.arrays[i].n < 0) return "n must not be negative";
  }
  return nullptr;
}

const char* check_shape(const longhaul_moe_gating_top_k_args& a) {
  if (a.T < 0) return "T must not be negative";
  if (a.k < 1 || a.k > a.E) return "k must be 1 to E";
  if (a.n_group < 1 || a.E % a.n_group != 0) return "n_group must divide E";
  if (a.topk_group < 1 || a.topk_group > a.n_group) return "topk_group must be 1 to n_group";
  return nullptr;
}

const char* check_shape(const longhaul_sparse_attention_grad_args& a) {
  return check_shape(a.forward);
}

const char* check_shape(const longhaul_sparse_attention_expanded_grad_args& a) {
  return check_shape(a.forward);
}

const char* check_shape(const longhaul_moe_gating_top_k_grad_args& a) {
  return check_shape(a.forward);
}

// What stands in the arrays.
const char* check_contents(const longhaul_cross_entropy_args& a) {
  for (int64_t i = 0; i < a.rows; ++i) {
    const bool counts = a.labels[i] != -100;
    if (counts && (a.labels[i] < 0 || a.labels[i] >= a.V)) {
      return "a label is out of bounds: neither -100 nor in 0 .. V - 1";
    }
  }
  return nullptr;
}

const char* check_contents(const longhaul_moe_gating_top_k_args& a) {
  for (int64_t i = 0; a.chosen && i < a.T * a.k; ++i) {
    if (a.experts[i] < 0 || a.experts[i] >= a.E) return "experts must lie in 0 .. E - 1";
  }
  return nullptr;
}

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

}  // namespace
}  // namespace longhaul::cpu

using longhaul::cpu::bytes_of;
using longhaul::cpu::check;
using longhaul::cpu::kernels;

extern "C" {

size_t longhaul_lightning_indexer_workspace(const longhaul_lightning_indexer_args* args) {
  return bytes_of(*args, kernels().lightning_indexer_workspace);
}

const char* longhaul_lightning_indexer(const longhaul_lightning_indexer_args* args,
                                       void* workspace) {
  if (const char* wrong = check(*args)) return wrong;
  kernels().lightning_indexer(*args, workspace);
  return nullptr;
}

size_t longhaul_lightning_indexer_grad_workspace(const longhaul_lightning_indexer_grad_args* args) {
  return bytes_of(*args, kernels().lightning_indexer_grad_workspace);
}

const char* longhaul_lightning_indexer_grad(const longhaul_lightning_indexer_grad_args* args,
                                            void* workspace) {
  if (const char* wrong = check(*args)) return wrong;
  kernels().lightning_indexer_grad(*args, workspace);
  return nullptr;
}

size_t longhaul_sparse_attention_workspace(const longhaul_sparse_attention_args* args) {
  return bytes_of(*args, kernels().sparse_attention_workspace);
}

const char* longhaul_sparse_attention(const longhaul_sparse_attention_args* args, void* workspace) {
  if (const char* wrong = check(*args)) return wrong;
  kernels().sparse_attention(*args, workspace);
  return nullptr;
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
  if (const char* wrong = check(*args)) return wrong;
  kernels().sparse_attention_grad(*args, workspace);
  return nullptr;
}

size_t longhaul_sparse_attention_expanded_workspace(
    const longhaul_sparse_attention_expanded_args* args) {
  return bytes_of(*args, kernels().sparse_attention_expanded_workspace);
}

const char* longhaul_sparse_attention_expanded(const longhaul_sparse_attention_expanded_args* args,
                                               void* workspace) {
  if (const char* wrong = check(*args)) return wrong;
  kernels().sparse_attention_expanded(*args, workspace);
  return nullptr;
}

size_t longhaul_sparse_attention_expanded_grad_workspace(
    const longhaul_sparse_attention_expanded_grad_args* args) {
  return bytes_of(*args, kernels().sparse_attention_expanded_grad_workspace);
}

const char* longhaul_sparse_attention_expanded_grad(
    const longhaul_sparse_attention_expanded_grad_args* args, void* workspace) {
  if (const char* wrong = check(*args)) return wrong;
  kernels().sparse_attention_expanded_grad(*args, workspace);
  return nullptr;
}

size_t longhaul_flash_attention_workspace(const longhaul_flash_attention_args* args) {
  return bytes_of(*args, kernels().flash_attention_workspace);
}

const char* longhaul_flash_attention(const longhaul_flash_attention_args* args, void* workspace) {
  if (const char* wrong = check(*args)) return wrong;
  kernels().flash_attention(*args, workspace);
  return nullptr;
}

size_t longhaul_flash_attention_grad_workspace(const longhaul_flash_attention_grad_args* args) {
  return bytes_of(*args, kernels().flash_attention_grad_workspace);
}

const char* longhaul_flash_attention_grad(const longhaul_flash_attention_grad_args* args,
                                          void* workspace) {
  if (const char* wrong = check(*args)) return wrong;
  kernels().flash_attention_grad(*args, workspace);
  return nullptr;
}

size_t longhaul_indexer_kl_loss_workspace(const longhaul_indexer_kl_loss_args* args) {
  return bytes_of(*args, kernels().indexer_kl_loss_workspace);
}

const char* longhaul_indexer_kl_loss(const longhaul_indexer_kl_loss_args* args, void* workspace) {
  if (const char* wrong = check(*args)) return wrong;
  kernels().indexer_kl_loss(*args, workspace);
  return nullptr;
}

size_t longhaul_attention_head_sum_workspace(const longhaul_attention_head_sum_args* args) {
  return bytes_of(*args, kernels().attention_head_sum_workspace);
}

const char* longhaul_attention_head_sum(const longhaul_attention_head_sum_args* args,
                                        void* workspace) {
  if (const char* wrong = check(*args)) return wrong;
  kernels().attention_head_sum(*args, workspace);
  return nullptr;
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

double longhaul_kernels_peak_flops(longhaul_dtype dtype, double seconds) {
  return kernels().peak_flops(dtype, seconds);
}

const char* longhaul_rms_norm(const longhaul_rms_norm_args* args) {
  if (const char* wrong = check(*args)) return wrong;
  kernels().rms_norm(*args);
  return nullptr;
}

size_t longhaul_rms_norm_grad_workspace(const longhaul_rms_norm_grad_args* args) {
  return bytes_of(*args, kernels().rms_norm_grad_workspace);
}

const char* longhaul_rms_norm_grad(const longhaul_rms_norm_grad_args* args, void* workspace) {
  if (const char* wrong = check(*args)) return wrong;
  kernels().rms_norm_grad(*args, workspace);
  return nullptr;
}

size_t longhaul_grouped_matmul_workspace(const longhaul_grouped_matmul_args* args) {
  return bytes_of(*args, kernels().grouped_matmul_workspace);
}

const char* longhaul_grouped_matmul(const longhaul_grouped_matmul_args* args, void* workspace) {
  if (const char* wrong = check(*args)) return wrong;
  kernels().grouped_matmul(*args, workspace);
  return nullptr;
}

size_t longhaul_grouped_matmul_grad_workspace(const longhaul_grouped_matmul_grad_args* args) {
  return bytes_of(*args, kernels().grouped_matmul_grad_workspace);
}

const char* longhaul_grouped_matmul_grad(const longhaul_grouped_matmul_grad_args* args,
                                         void* workspace) {
  if (const char* wrong = check(*args)) return wrong;
  kernels().grouped_matmul_grad(*args, workspace);
  return nullptr;
}

const char* longhaul_rotary_mul(const longhaul_rotary_mul_args* args) {
  if (const char* wrong = check(*args)) return wrong;
  kernels().rotary_mul(*args);
  return nullptr;
}

const char* longhaul_swiglu(const longhaul_swiglu_args* args) {
  if (const char* wrong = check(*args)) return wrong;
  kernels().swiglu(*args);
  return nullptr;
}

const char* longhaul_swiglu_grad(const longhaul_swiglu_grad_args* args) {
  if (const char* wrong = check(*args)) return wrong;
  kernels().swiglu_grad(*args);
  return nullptr;
}

const char* longhaul_moe_token_permute(const longhaul_moe_token_permute_args* args) {
  if (const char* wrong = check(*args)) return wrong;
  kernels().moe_token_permute(*args);
  return nullptr;
}

const char* longhaul_moe_token_unpermute(const longhaul_moe_token_unpermute_args* args) {
  if (const char* wrong = check(*args)) return wrong;
  kernels().moe_token_unpermute(*args);
  return nullptr;
}

const char* longhaul_cross_entropy(const longhaul_cross_entropy_args* args) {
  if (const char* wrong = check(*args)) return wrong;
  kernels().cross_entropy(*args);
  return nullptr;
}

const char* longhaul_adam_w(const longhaul_adam_w_args* args) {
  if (const char* wrong = check(*args)) return wrong;
  kernels().adam_w(*args);
  return nullptr;
}

size_t longhaul_sum_of_squares_workspace(const longhaul_sum_of_squares_args* args) {
  return bytes_of(*args, kernels().sum_of_squares_workspace);
}

const char* longhaul_sum_of_squares(const longhaul_sum_of_squares_args* args, void* workspace) {
  if (const char* wrong = check(*args)) return wrong;
  kernels().sum_of_squares(*args, workspace);
  return nullptr;
}

size_t longhaul_moe_gating_top_k_workspace(const longhaul_moe_gating_top_k_args* args) {
  return bytes_of(*args, kernels().moe_gating_top_k_workspace);
}

const char* longhaul_moe_gating_top_k(const longhaul_moe_gating_top_k_args* args, void* workspace) {
  if (const char* wrong = check(*args)) return wrong;
  kernels().moe_gating_top_k(*args, workspace);
  return nullptr;
}

const char* longhaul_moe_gating_top_k_grad(const longhaul_moe_gating_top_k_grad_args* args) {
  auto chosen = *args;
  chosen.forward.chosen = 1;
  if (const char* wrong = check(chosen)) return wrong;
  kernels().moe_gating_top_k_grad(*args);
  return nullptr;
}

const char* longhaul_kernels_isa(void) {
  return longhaul::cpu::name_of(longhaul::cpu::chosen_isa().isa);
}

const char* longhaul_kernels_isa_reason(void) { return longhaul::cpu::chosen_isa().reason.c_str(); }

}  // extern "C"
