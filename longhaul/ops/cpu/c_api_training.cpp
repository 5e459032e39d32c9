// The functions of include/longhaul/kernels.h: the loss and the optimizer.
#include "longhaul/ops/cpu/c_api.h"

namespace longhaul::cpu {

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

const char* check_contents(const longhaul_cross_entropy_args& a) {
  for (int64_t i = 0; i < a.rows; ++i) {
    const bool counts = a.labels[i] != -100;
    if (counts && (a.labels[i] < 0 || a.labels[i] >= a.V)) {
      return "a label is out of bounds: neither -100 nor in 0 .. V - 1";
    }
  }
  return nullptr;
}

}  // namespace longhaul::cpu

using longhaul::cpu::bytes_of;
using longhaul::cpu::kernels;
using longhaul::cpu::run;

extern "C" {

const char* longhaul_cross_entropy(const longhaul_cross_entropy_args* args) {
  return run(*args, kernels().cross_entropy);
}

const char* longhaul_adam_w(const longhaul_adam_w_args* args) {
  return run(*args, kernels().adam_w);
}

size_t longhaul_sum_of_squares_workspace(const longhaul_sum_of_squares_args* args) {
  return bytes_of(*args, kernels().sum_of_squares_workspace);
}

const char* longhaul_sum_of_squares(const longhaul_sum_of_squares_args* args, void* workspace) {
  return run(*args, workspace, kernels().sum_of_squares);
}

}  // extern "C"
