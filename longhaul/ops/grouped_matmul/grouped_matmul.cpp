#include "longhaul/ops/grouped_matmul/grouped_matmul.h"

#include <torch/csrc/autograd/custom_function.h>

#include "longhaul/ops/common.h"
#include "longhaul/ops/cpu/tensors.h"
#include "longhaul/ops/saved_results.h"

namespace longhaul::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// rows times each group's matrix, transposed or not.
Tensor products(const Tensor& rows, const Tensor& weight_ENK, const Tensor& counts_E,
                bool transposed) {
  const int64_t M = rows.size(0), N = weight_ENK.size(1), K = weight_ENK.size(2);
  Tensor out = at::empty({M, transposed ? K : N}, rows.options());
  if (rows.is_meta()) return out;
  run_kernel("grouped_matmul", longhaul_grouped_matmul, longhaul_grouped_matmul_workspace,
             longhaul_grouped_matmul_args{.dtype = kernel_dtype(rows),
                                          .transposed = transposed,
                                          .M = M,
                                          .N = N,
                                          .K = K,
                                          .E = weight_ENK.size(0),
                                          .counts = counts_E.const_data_ptr<int64_t>(),
                                          .in = rows.const_data_ptr(),
                                          .weight = weight_ENK.const_data_ptr(),
                                          .out = out.data_ptr()});
  return out;
}

Tensor weight_gradient(const Tensor& dy_MN, const Tensor& x_MK, const Tensor& weight_ENK,
                       const Tensor& counts_E) {
  Tensor d_weight = at::empty(weight_ENK.sizes(), weight_ENK.options());
  if (dy_MN.is_meta()) return d_weight;
  run_kernel("grouped_matmul_grad", longhaul_grouped_matmul_grad,
             longhaul_grouped_matmul_grad_workspace,
             longhaul_grouped_matmul_grad_args{.dtype = kernel_dtype(dy_MN),
                                               .M = dy_MN.size(0),
                                               .N = dy_MN.size(1),
                                               .K = x_MK.size(1),
                                               .E = weight_ENK.size(0),
                                               .counts = counts_E.const_data_ptr<int64_t>(),
                                               .dy = dy_MN.const_data_ptr(),
                                               .x = x_MK.const_data_ptr(),
                                               .d_weight = d_weight.data_ptr()});
  return d_weight;
}

struct FusedGroupedMatmul : torch::autograd::Function<FusedGroupedMatmul> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                        const Tensor& counts) {
    ctx->save_for_backward({x, weight, counts});
    return saved_or_computed({.op = "grouped_matmul"},
                             [&] { return products(x, weight, counts, /*transposed=*/false); });
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const auto [d_x, d_weight] = grouped_matmul_grad(
        grads[0], saved[0], saved[1], saved[2],
        {.d_x = ctx->needs_input_grad(0), .d_weight = ctx->needs_input_grad(1)});
    return {d_x, d_weight, Tensor()};
  }
};

std::string why_not_fused(const Tensor& x, const Tensor& weight) {
  if (x.scalar_type() != weight.scalar_type()) return "rows and weight differ in dtype";
  if (weight.size(1) == 0 || weight.size(2) == 0) return "it is for widths of at least 1";
  return why_no_cpu_kernel(x);
}

void check_operands(const Tensor& x_MK, const Tensor& weight_ENK, const Tensor& counts_E) {
  LONGHAUL_CHECK(x_MK.dim() == 2 && weight_ENK.dim() == 3 && x_MK.size(1) == weight_ENK.size(2) &&
                     counts_E.numel() == weight_ENK.size(0),
                 "grouped_matmul: expected x [M, K], weight [E, N, K] and E counts, got [{}], [{}] "
                 "and {} counts",
                 shape_text(x_MK), shape_text(weight_ENK), counts_E.numel());
  check_same_dtype(weight_ENK, x_MK, "grouped_matmul: weight", "x");
}

}  // namespace

GroupedMatmulGradients grouped_matmul_grad(const Tensor& dy_MN, const Tensor& x_MK,
                                           const Tensor& weight_ENK, const Tensor& counts_E,
                                           WantedGradients wanted) {
  check_operands(x_MK, weight_ENK, counts_E);
  check_shape(dy_MN, {x_MK.size(0), weight_ENK.size(1)}, "grouped_matmul: gradient");
  if (const std::string reason = why_not_fused(x_MK, weight_ENK); !reason.empty()) {
    report_fallback("grouped_matmul_grad", reason);
    return grouped_matmul_grad_reference(dy_MN, x_MK, weight_ENK, counts_E, wanted);
  }
  const Tensor dy = dy_MN.contiguous(), weight = weight_ENK.contiguous();
  const Tensor counts = counts_E.contiguous();
  GroupedMatmulGradients result;
  if (wanted.d_x) result.d_x = products(dy, weight, counts, /*transposed=*/true);
  if (wanted.d_weight) result.d_weight = weight_gradient(dy, x_MK.contiguous(), weight, counts);
  return result;
}

Tensor grouped_matmul(const Tensor& x_MK, const Tensor& weight_ENK, const Tensor& counts_E,
                      Kernel kernel) {
  check_operands(x_MK, weight_ENK, counts_E);
  if (kernel == Kernel::kFused) {
    const std::string reason = why_not_fused(x_MK, weight_ENK);
    if (reason.empty()) {
      return FusedGroupedMatmul::apply(x_MK.contiguous(), weight_ENK.contiguous(),
                                       counts_E.contiguous());
    }
    report_fallback("grouped_matmul", reason);
  }
  return grouped_matmul_reference(x_MK, weight_ENK, counts_E);
}

}  // namespace longhaul::ops
