// The functions of include/longhaul/kernels.h: the router and the experts.
#include "longhaul/ops/cpu/c_api.h"

namespace longhaul::cpu {
namespace {

const char* check_groups(int64_t M, int64_t N, int64_t K, int64_t E) {
  if (M < 0 || E < 0) return "M and E must not be negative";
  return N < 1 || K < 1 ? "N and K must be at least 1" : nullptr;
}

// Of T * k choices among as many rows.
const char* check_choices(int64_t T, int64_t k, int64_t D) {
  return T < 0 || k < 0 || D < 0 ? "T, k and D must not be negative" : nullptr;
}

}  // namespace

const char* check_shape(const longhaul_grouped_matmul_args& a) {
  return check_groups(a.M, a.N, a.K, a.E);
}

const char* check_shape(const longhaul_grouped_matmul_grad_args& a) {
  return check_groups(a.M, a.N, a.K, a.E);
}

const char* check_shape(const longhaul_moe_gating_top_k_args& a) {
  if (a.T < 0) return "T must not be negative";
  if (a.k < 1 || a.k > a.E) return "k must be 1 to E";
  if (a.n_group < 1 || a.E % a.n_group != 0) return "n_group must divide E";
  if (a.topk_group < 1 || a.topk_group > a.n_group) return "topk_group must be 1 to n_group";
  return nullptr;
}

const char* check_shape(const longhaul_moe_gating_top_k_grad_args& a) {
  return check_shape(a.forward);
}

const char* check_shape(const longhaul_moe_token_permute_args& a) {
  if ((a.rows == nullptr) != (a.d_probs == nullptr)) return "rows and d_probs, or none of the two";
  return check_choices(a.T, a.k, a.D);
}

const char* check_shape(const longhaul_moe_token_unpermute_args& a) {
  return check_choices(a.T, a.k, a.D);
}

const char* check_contents(const longhaul_moe_gating_top_k_args& a) {
  for (int64_t i = 0; a.chosen && i < a.T * a.k; ++i) {
    if (a.experts[i] < 0 || a.experts[i] >= a.E) return "experts must lie in 0 .. E - 1";
  }
  return nullptr;
}

}  // namespace longhaul::cpu

using longhaul::cpu::bytes_of;
using longhaul::cpu::check;
using longhaul::cpu::kernels;
using longhaul::cpu::run;

extern "C" {

size_t longhaul_grouped_matmul_workspace(const longhaul_grouped_matmul_args* args) {
  return bytes_of(*args, kernels().grouped_matmul_workspace);
}

const char* longhaul_grouped_matmul(const longhaul_grouped_matmul_args* args, void* workspace) {
  return run(*args, workspace, kernels().grouped_matmul);
}

size_t longhaul_grouped_matmul_grad_workspace(const longhaul_grouped_matmul_grad_args* args) {
  return bytes_of(*args, kernels().grouped_matmul_grad_workspace);
}

const char* longhaul_grouped_matmul_grad(const longhaul_grouped_matmul_grad_args* args,
                                         void* workspace) {
  return run(*args, workspace, kernels().grouped_matmul_grad);
}

const char* longhaul_moe_token_permute(const longhaul_moe_token_permute_args* args) {
  return run(*args, kernels().moe_token_permute);
}

const char* longhaul_moe_token_unpermute(const longhaul_moe_token_unpermute_args* args) {
  return run(*args, kernels().moe_token_unpermute);
}

size_t longhaul_moe_gating_top_k_workspace(const longhaul_moe_gating_top_k_args* args) {
  return bytes_of(*args, kernels().moe_gating_top_k_workspace);
}

const char* longhaul_moe_gating_top_k(const longhaul_moe_gating_top_k_args* args, void* workspace) {
  return run(*args, workspace, kernels().moe_gating_top_k);
}

const char* longhaul_moe_gating_top_k_grad(const longhaul_moe_gating_top_k_grad_args* args) {
  auto chosen = *args;
  chosen.forward.chosen = 1;
  if (const char* wrong = check(chosen)) return wrong;
  kernels().moe_gating_top_k_grad(*args);
  return nullptr;
}

}  // extern "C"
