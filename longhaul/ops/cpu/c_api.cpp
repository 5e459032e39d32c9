// The functions of include/longhaul/kernels.h: arguments are checked here, once, so that the
// kernels need not.
#include <atomic>

#include "include/longhaul/kernels.h"
#include "longhaul/ops/cpu/isa.h"

namespace longhaul::cpu {
namespace {

constexpr int64_t kMaxKeys = int64_t{1} << 30;  // indices are int32

const char* check_sizes(int64_t B, int64_t S, int64_t L, int64_t H, int64_t D, int64_t K) {
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

const char* check_ranges(const longhaul_lightning_indexer_args& a) {
  for (int64_t i = 0; i < a.B * a.S; ++i) {
    const bool none = a.first_key[i] > a.last_key[i];
    if (!none && (a.first_key[i] < 0 || a.last_key[i] >= a.L)) {
      return "first_key and last_key must lie in 0 .. L - 1";
    }
  }
  return nullptr;
}

const char* check(const longhaul_lightning_indexer_args& a) {
  if (const char* wrong = check_sizes(a.B, a.S, a.L, a.H, a.D, a.K)) return wrong;
  if (a.dtype == LONGHAUL_BFLOAT16 && a.D % 2 != 0) return "D must be even for bf16";
  return check_ranges(a);
}

const char* check(const longhaul_sparse_attention_args& a) {
  if (const char* wrong = check_sizes(a.B, a.S, a.L, a.H, a.D, a.K)) return wrong;
  if (a.D % 32 != 0 || a.V % 32 != 0) return "D and V must be multiples of 32";
  if (a.V < 1 || a.V > a.D) return "V must be 1 to D";
  return check_indices(a.indices, a.B * a.S, a.K, a.L);
}

const char* check(const longhaul_indexer_kl_loss_args& a) {
  if (const char* wrong = check_sizes(a.B, a.S, a.L, a.H, a.D, a.K)) return wrong;
  if (a.D % 32 != 0) return "D must be a multiple of 32";
  const bool some = a.d_query || a.d_key || a.d_weights;
  if (some && !(a.d_query && a.d_key && a.d_weights)) return "all three gradients or none";
  return check_indices(a.indices, a.B * a.S, a.K, a.L);
}

}  // namespace
}  // namespace longhaul::cpu

using longhaul::cpu::check;
using longhaul::cpu::kernels;

extern "C" {

size_t longhaul_lightning_indexer_workspace(const longhaul_lightning_indexer_args* args) {
  return kernels().lightning_indexer_workspace(*args);
}

const char* longhaul_lightning_indexer(const longhaul_lightning_indexer_args* args,
                                       void* workspace) {
  if (const char* wrong = check(*args)) return wrong;
  kernels().lightning_indexer(*args, workspace);
  return nullptr;
}

size_t longhaul_sparse_attention_workspace(const longhaul_sparse_attention_args* args) {
  return kernels().sparse_attention_workspace(*args);
}

const char* longhaul_sparse_attention(const longhaul_sparse_attention_args* args, void* workspace) {
  if (const char* wrong = check(*args)) return wrong;
  kernels().sparse_attention(*args, workspace);
  return nullptr;
}

size_t longhaul_sparse_attention_grad_workspace(const longhaul_sparse_attention_grad_args* args) {
  return kernels().sparse_attention_grad_workspace(*args);
}

const char* longhaul_sparse_attention_grad(const longhaul_sparse_attention_grad_args* args,
                                           void* workspace) {
  if (const char* wrong = check(args->forward)) return wrong;
  kernels().sparse_attention_grad(*args, workspace);
  return nullptr;
}

size_t longhaul_indexer_kl_loss_workspace(const longhaul_indexer_kl_loss_args* args) {
  return kernels().indexer_kl_loss_workspace(*args);
}

const char* longhaul_indexer_kl_loss(const longhaul_indexer_kl_loss_args* args, void* workspace) {
  if (const char* wrong = check(*args)) return wrong;
  kernels().indexer_kl_loss(*args, workspace);
  return nullptr;
}

double longhaul_kernels_peak_flops(longhaul_dtype dtype, double seconds) {
  return kernels().peak_flops(dtype, seconds);
}

const char* longhaul_kernels_isa(void) {
  return longhaul::cpu::name_of(longhaul::cpu::chosen_isa().isa);
}

const char* longhaul_kernels_isa_reason(void) { return longhaul::cpu::chosen_isa().reason.c_str(); }

}  // extern "C"
