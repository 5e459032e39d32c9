#include "longhaul/ops/sum_of_squares/sum_of_squares.h"

#include <ATen/ATen.h>

#include "longhaul/ops/common.h"
#include "longhaul/ops/cpu/tensors.h"

namespace longhaul::ops {
namespace {

double fused(const std::vector<Tensor>& tensors) {
  std::vector<longhaul_array> arrays;
  for (const auto& x : tensors) {
    arrays.push_back({.dtype = kernel_dtype(x), .n = x.numel(), .data = x.const_data_ptr()});
  }
  double sum = 0;
  run_kernel(
      "sum_of_squares", longhaul_sum_of_squares, longhaul_sum_of_squares_workspace,
      longhaul_sum_of_squares_args{
          .count = static_cast<int64_t>(arrays.size()), .arrays = arrays.data(), .sum = &sum});
  return sum;
}

}  // namespace

double sum_of_squares(const std::vector<Tensor>& tensors) {
  std::vector<Tensor> here, elsewhere;
  for (const auto& x : tensors) {
    const bool is_here = x.device().is_cpu() && why_no_cpu_kernel(x).empty();
    is_here ? here.push_back(x.contiguous()) : elsewhere.push_back(x);
  }
  return fused(here) + sum_of_squares_reference(elsewhere);
}

}  // namespace longhaul::ops
