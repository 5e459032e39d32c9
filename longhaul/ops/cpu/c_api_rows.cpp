// The functions of include/longhaul/kernels.h: norms, rotary embedding and activations.
#include "longhaul/ops/cpu/c_api.h"

namespace longhaul::cpu {

const char* check_shape(const longhaul_rms_norm_args& a) {
  if (a.rows < 0) return "rows must not be negative";
  return a.D < 1 ? "D must be at least 1" : nullptr;
}

const char* check_shape(const longhaul_rms_norm_grad_args& a) {
  if (a.rows < 0) return "rows must not be negative";
  return a.D < 1 ? "D must be at least 1" : nullptr;
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

}  // namespace longhaul::cpu

using longhaul::cpu::bytes_of;
using longhaul::cpu::kernels;
using longhaul::cpu::run;

extern "C" {

const char* longhaul_rms_norm(const longhaul_rms_norm_args* args) {
  return run(*args, kernels().rms_norm);
}

size_t longhaul_rms_norm_grad_workspace(const longhaul_rms_norm_grad_args* args) {
  return bytes_of(*args, kernels().rms_norm_grad_workspace);
}

const char* longhaul_rms_norm_grad(const longhaul_rms_norm_grad_args* args, void* workspace) {
  return run(*args, workspace, kernels().rms_norm_grad);
}

const char* longhaul_rotary_mul(const longhaul_rotary_mul_args* args) {
  return run(*args, kernels().rotary_mul);
}

const char* longhaul_swiglu(const longhaul_swiglu_args* args) {
  return run(*args, kernels().swiglu);
}

const char* longhaul_swiglu_grad(const longhaul_swiglu_grad_args* args) {
  return run(*args, kernels().swiglu_grad);
}

}  // extern "C"
