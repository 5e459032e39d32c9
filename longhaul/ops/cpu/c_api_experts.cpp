// The functions of include/longhaul/kernels.h: the router and the experts.
#include "longhaul/ops/cpu/c_api.h"

namespace longhaul::cpu {
namespace {

const char* check_groups(int64_t M, int64_t N, int64_t K, int64_t E) {
  if (const char* error = check_at_least(0, M, "M")) return error;
  if (const char* error = check_at_least(0, E, "E")) return error;
  if (const char* error = check_at_least(1, N, "N")) return error;
  return check_at_least(1, K, "K");
}

// Of T * k choices among as many rows.
const char* check_choices(int64_t T, int64_t k, int64_t D) {
  if (const char* error = check_at_least(0, T, "T")) return error;
  if (const char* error = check_at_least(0, k, "k")) return error;
  return check_at_least(0, D, "D");
}

}  // namespace

const char* check_shape(const longhaul_grouped_matmul_args& a) {
  return check_groups(a.M, a.N, a.K, a.E);
}

const char* check_shape(const longhaul_grouped_matmul_grad_args& a) {
  return check_groups(a.M, a.N, a.K, a.E);
}

const char* check_shape(const longhaul_moe_gating_top_k_args& a) {
  if (const char* error = check_at_least(0, a.T, "T")) return error;
  if (a.k < 1 || a.k > a.E) return wrong("k: expected 1 to {} (E), got {}", a.E, a.k);
  if (a.n_group < 1 || a.E % a.n_group != 0) {
    return wrong("n_group: expected a divisor of {} (E), got {}", a.E, a.n_group);
  }
  if (a.topk_group >= 1 && a.topk_group <= a.n_group) return nullptr;
  return wrong("topk_group: expected 1 to {} (n_group), got {}", a.n_group, a.topk_group);
}

const char* check_shape(const longhaul_moe_gating_top_k_grad_args& a) {
  return check_shape(a.forward);
}

const char* check_shape(const longhaul_moe_token_permute_args& a) {
  if ((a.rows == nullptr) != (a.d_probs == nullptr)) {
    return wrong("rows and d_probs: expected both or none, got {} alone",
                 a.rows ? "rows" : "d_probs");
  }
  return check_choices(a.T, a.k, a.D);
}

const char* check_shape(const longhaul_moe_token_unpermute_args& a) {
  return check_choices(a.T, a.k, a.D);
}

const char* check_contents(const longhaul_moe_gating_top_k_args& a) {
  for (int64_t i = 0; a.chosen && i < a.T * a.k; ++i) {
    if (a.experts[i] >= 0 && a.experts[i] < a.E) continue;
    return wrong("experts: expected 0 to {} (E - 1), got {} for token {}", a.E - 1, a.experts[i],
                 i / a.k);
  }
  return nullptr;
}

}  // namespace longhaul::cpu

using longhaul::cpu::bytes_of;
using longhaul::cpu::KernelTable;
using longhaul::cpu::run;

extern "C" {

size_t longhaul_grouped_matmul_workspace(const longhaul_grouped_matmul_args* args) {
  return bytes_of(*args, &KernelTable::grouped_matmul_workspace);
}

const char* longhaul_grouped_matmul(const longhaul_grouped_matmul_args* args, void* workspace) {
  return run(*args, workspace, &KernelTable::grouped_matmul);
}

size_t longhaul_grouped_matmul_grad_workspace(const longhaul_grouped_matmul_grad_args* args) {
  return bytes_of(*args, &KernelTable::grouped_matmul_grad_workspace);
}

const char* longhaul_grouped_matmul_grad(const longhaul_grouped_matmul_grad_args* args,
                                         void* workspace) {
  return run(*args, workspace, &KernelTable::grouped_matmul_grad);
}

const char* longhaul_moe_token_permute(const longhaul_moe_token_permute_args* args) {
  return run(*args, &KernelTable::moe_token_permute);
}

const char* longhaul_moe_token_unpermute(const longhaul_moe_token_unpermute_args* args) {
  return run(*args, &KernelTable::moe_token_unpermute);
}

size_t longhaul_moe_gating_top_k_workspace(const longhaul_moe_gating_top_k_args* args) {
  return bytes_of(*args, &KernelTable::moe_gating_top_k_workspace);
}

const char* longhaul_moe_gating_top_k(const longhaul_moe_gating_top_k_args* args, void* workspace) {
  return run(*args, workspace, &KernelTable::moe_gating_top_k);
}

const char* longhaul_moe_gating_top_k_grad(const longhaul_moe_gating_top_k_grad_args* args) {
  auto chosen = *args;
  chosen.forward.chosen = 1;
  return run(chosen, &KernelTable::moe_gating_top_k_grad);
}

}  // extern "C"
