// The functions of include/longhaul/kernels.h: norms, rotary embedding and activations.
#include "longhaul/ops/cpu/c_api.h"

namespace longhaul::cpu {

const char* check_shape(const longhaul_rms_norm_args& a) {
  if (const char* error = check_at_least(0, a.rows, "rows")) return error;
  return check_at_least(1, a.D, "D");
}

const char* check_shape(const longhaul_rms_norm_grad_args& a) {
  if (const char* error = check_at_least(0, a.rows, "rows")) return error;
  return check_at_least(1, a.D, "D");
}

const char* check_shape(const longhaul_rotary_mul_args& a) {
  if (const char* error = check_at_least(0, a.T, "T")) return error;
  if (const char* error = check_at_least(0, a.H, "H")) return error;
  if (a.R >= 0 && a.R % 2 == 0) return nullptr;
  return wrong("R: expected an even number that is not negative, got {}", a.R);
}

const char* check_shape(const longhaul_swiglu_args& a) {
  if (const char* error = check_at_least(0, a.rows, "rows")) return error;
  return check_at_least(0, a.D, "D");
}

const char* check_shape(const longhaul_swiglu_grad_args& a) {
  if (const char* error = check_at_least(0, a.rows, "rows")) return error;
  if (const char* error = check_at_least(0, a.D, "D")) return error;
  return check_at_least(a.D, a.d_stride, "d_stride");
}

}  // namespace longhaul::cpu

using longhaul::cpu::bytes_of;
using longhaul::cpu::KernelTable;
using longhaul::cpu::run;

extern "C" {

const char* longhaul_rms_norm(const longhaul_rms_norm_args* args) {
  return run(*args, &KernelTable::rms_norm);
}

size_t longhaul_rms_norm_grad_workspace(const longhaul_rms_norm_grad_args* args) {
  return bytes_of(*args, &KernelTable::rms_norm_grad_workspace);
}

const char* longhaul_rms_norm_grad(const longhaul_rms_norm_grad_args* args, void* workspace) {
  return run(*args, workspace, &KernelTable::rms_norm_grad);
}

const char* longhaul_rotary_mul(const longhaul_rotary_mul_args* args) {
  return run(*args, &KernelTable::rotary_mul);
}

const char* longhaul_swiglu(const longhaul_swiglu_args* args) {
  return run(*args, &KernelTable::swiglu);
}

const char* longhaul_swiglu_grad(const longhaul_swiglu_grad_args* args) {
  return run(*args, &KernelTable::swiglu_grad);
}

}  // extern "C"
