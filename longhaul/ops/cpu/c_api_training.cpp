// The functions of include/longhaul/kernels.h: the loss and the optimizer.
#include "longhaul/ops/cpu/c_api.h"

namespace longhaul::cpu {
namespace {

// Of numbers; NaN is none of what they expect.
const char* check_at_least_0(double x, const char* name) {
  return x >= 0 ? nullptr : wrong("{}: expected at least 0, got {}", name, x);
}

const char* check_decay(double beta, const char* name) {
  const bool fits = beta >= 0 && beta < 1;
  return fits ? nullptr : wrong("{}: expected 0 to below 1, got {}", name, beta);
}

// With the place of the element that it is about: "parameters[3].step: expected ...".
const char* in_element(const char* array, int64_t i, const char* error) {
  return error ? wrong("{}[{}].{}", array, i, error) : nullptr;
}

const char* check_parameter(const longhaul_adam_w_parameter& p) {
  if (const char* error = check_dtype(p.dtype)) return error;
  if (const char* error = check_at_least(0, p.n, "n")) return error;
  if (const char* error = check_at_least(1, p.step, "step")) return error;
  return check_at_least_0(p.weight_decay, "weight_decay");
}

}  // namespace

const char* check_shape(const longhaul_cross_entropy_args& a) {
  if (const char* error = check_at_least(0, a.rows, "rows")) return error;
  if (const char* error = check_at_least(0, a.V, "V")) return error;
  return check_at_least(a.V, a.stride, "stride");  // rows are written
}

const char* check_shape(const longhaul_adam_w_args& a) {
  for (int64_t i = 0; i < a.count; ++i) {
    const char* error = in_element("parameters", i, check_parameter(a.parameters[i]));
    if (error) return error;
  }
  if (const char* error = check_at_least_0(a.lr, "lr")) return error;
  if (const char* error = check_at_least_0(a.eps, "eps")) return error;
  if (const char* error = check_decay(a.beta1, "beta1")) return error;
  return check_decay(a.beta2, "beta2");
}

const char* check_shape(const longhaul_sum_of_squares_args& a) {
  for (int64_t i = 0; i < a.count; ++i) {
    if (const char* error = check_dtype(a.arrays[i].dtype)) return error;
    if (const char* error = check_at_least(0, a.arrays[i].n, "n")) return error;
  }
  return nullptr;
}

const char* check_contents(const longhaul_cross_entropy_args& a) {
  for (int64_t i = 0; i < a.rows; ++i) {
    const bool counts = a.labels[i] != -100;
    if (counts && (a.labels[i] < 0 || a.labels[i] >= a.V)) {
      return wrong("a label is out of bounds: expected -100 or 0 to {} (V - 1), got {} in row {}",
                   a.V - 1, a.labels[i], i);
    }
  }
  return nullptr;
}

}  // namespace longhaul::cpu

using longhaul::cpu::bytes_of;
using longhaul::cpu::KernelTable;
using longhaul::cpu::run;

extern "C" {

const char* longhaul_cross_entropy(const longhaul_cross_entropy_args* args) {
  return run(*args, &KernelTable::cross_entropy);
}

const char* longhaul_adam_w(const longhaul_adam_w_args* args) {
  return run(*args, &KernelTable::adam_w);
}

size_t longhaul_sum_of_squares_workspace(const longhaul_sum_of_squares_args* args) {
  return bytes_of(*args, &KernelTable::sum_of_squares_workspace);
}

const char* longhaul_sum_of_squares(const longhaul_sum_of_squares_args* args, void* workspace) {
  return run(*args, workspace, &KernelTable::sum_of_squares);
}

}  // extern "C"
