#include "longhaul/ops/swiglu/swiglu.h"

#include <torch/csrc/autograd/custom_function.h>

#include "longhaul/ops/common.h"
#include "longhaul/ops/cpu/tensors.h"

namespace longhaul::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Swiglu : torch::autograd::Function<Swiglu> {
  static Tensor forward(AutogradContext* ctx, const Tensor& gate_in, const Tensor& up_in) {
    const Tensor gate = gate_in.contiguous(), up = up_in.contiguous();
    ctx->save_for_backward({gate, up});
    Tensor y = at::empty(gate.sizes(), gate.options());
    if (gate.is_meta()) return y;
    run_kernel("swiglu", longhaul_swiglu,
               longhaul_swiglu_args{.dtype = kernel_dtype(gate),
                                    .n = gate.numel(),
                                    .gate = gate.const_data_ptr(),
                                    .up = up.const_data_ptr(),
                                    .y = y.data_ptr()});
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const Tensor &gate = saved[0], &up = saved[1], dy = grads[0].contiguous();
    const Tensor d_gate = at::empty_like(gate), d_up = at::empty_like(up);
    if (gate.is_meta()) return {d_gate, d_up};
    run_kernel("swiglu_grad", longhaul_swiglu_grad,
               longhaul_swiglu_grad_args{.dtype = kernel_dtype(gate),
                                         .n = gate.numel(),
                                         .dy = dy.const_data_ptr(),
                                         .gate = gate.const_data_ptr(),
                                         .up = up.const_data_ptr(),
                                         .d_gate = d_gate.data_ptr(),
                                         .d_up = d_up.data_ptr()});
    return {d_gate, d_up};
  }
};

std::string why_not_fused(const Tensor& gate, const Tensor& up) {
  if (gate.scalar_type() != up.scalar_type()) return "gate and up differ in dtype";
  return why_no_cpu_kernel(gate);
}

}  // namespace

Tensor swiglu(const Tensor& gate, const Tensor& up, Kernel kernel) {
  check_shape(up, gate.sizes(), "swiglu: up");
  if (kernel == Kernel::kFused) {
    const std::string reason = why_not_fused(gate, up);
    if (reason.empty()) return Swiglu::apply(gate, up);
    report_fallback("swiglu", reason);
  }
  return swiglu_reference(gate, up);
}

}  // namespace longhaul::ops
