#include "longhaul/ops/swiglu/swiglu.h"

#include <torch/csrc/autograd/custom_function.h>

#include "longhaul/ops/common.h"
#include "longhaul/ops/cpu/tensors.h"
#include "longhaul/ops/distributed.h"

namespace longhaul::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// [rows, D], as the kernels take it.
Tensor rows_of(const Tensor& x) {
  const int64_t D = x.dim() == 0 ? 1 : x.size(-1);
  return as_rows(x, {D == 0 ? 0 : x.numel() / D, D});
}

struct Swiglu : torch::autograd::Function<Swiglu> {
  static Tensor forward(AutogradContext* ctx, const Tensor& gate, const Tensor& up) {
    ctx->save_for_backward({gate, up});
    if (gate.is_meta()) return at::empty(gate.sizes(), gate.options());
    return swiglu_rows(rows_of(gate), rows_of(up)).view(gate.sizes());
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const Tensor &gate = saved[0], &up = saved[1];
    const Tensor d_gate = at::empty(gate.sizes(), gate.options());
    const Tensor d_up = at::empty(up.sizes(), up.options());
    if (!gate.is_meta()) {
      swiglu_rows_grad(rows_of(grads[0]), rows_of(gate), rows_of(up), rows_of(d_gate),
                       rows_of(d_up));
    }
    return {d_gate, d_up};
  }
};

std::string why_not_fused(const Tensor& gate, const Tensor& up) {
  if (gate.scalar_type() != up.scalar_type()) return "gate and up differ in dtype";
  return why_no_cpu_kernel(gate);
}

}  // namespace

Tensor swiglu_rows(const Tensor& gate_RD, const Tensor& up_RD) {
  Tensor y = at::empty(gate_RD.sizes(), gate_RD.options());
  run_kernel("swiglu", longhaul_swiglu,
             longhaul_swiglu_args{.dtype = kernel_dtype(gate_RD),
                                  .rows = gate_RD.size(0),
                                  .D = gate_RD.size(1),
                                  .gate_stride = gate_RD.stride(0),
                                  .up_stride = up_RD.stride(0),
                                  .gate = gate_RD.const_data_ptr(),
                                  .up = up_RD.const_data_ptr(),
                                  .y = y.data_ptr()});
  return y;
}

void swiglu_rows_grad(const Tensor& dy_RD, const Tensor& gate_RD, const Tensor& up_RD,
                      const Tensor& d_gate_RD, const Tensor& d_up_RD) {
  LONGHAUL_CHECK(d_gate_RD.stride(0) == d_up_RD.stride(0),
                 "swiglu_grad: rows of d_gate lie {} apart, those of d_up {}", d_gate_RD.stride(0),
                 d_up_RD.stride(0));
  run_kernel("swiglu_grad", longhaul_swiglu_grad,
             longhaul_swiglu_grad_args{.dtype = kernel_dtype(gate_RD),
                                       .rows = gate_RD.size(0),
                                       .D = gate_RD.size(1),
                                       .dy_stride = dy_RD.stride(0),
                                       .gate_stride = gate_RD.stride(0),
                                       .up_stride = up_RD.stride(0),
                                       .d_stride = d_gate_RD.stride(0),
                                       .dy = dy_RD.const_data_ptr(),
                                       .gate = gate_RD.const_data_ptr(),
                                       .up = up_RD.const_data_ptr(),
                                       .d_gate = d_gate_RD.data_ptr(),
                                       .d_up = d_up_RD.data_ptr()});
}

Tensor swiglu(const Tensor& gate, const Tensor& up, Kernel kernel) {
  if (is_distributed_tensor(gate)) {
    return distributed<Tensor(const Tensor&, const Tensor&, int64_t)>("swiglu").call(
        gate, up, static_cast<int64_t>(kernel));
  }
  check_is_floating(gate, "swiglu: gate");
  check_is_floating(up, "swiglu: up");
  check_shape(up, gate.sizes(), "swiglu: up");
  if (kernel == Kernel::kFused) {
    const std::string reason = why_not_fused(gate, up);
    if (reason.empty()) return Swiglu::apply(gate, up);
    report_fallback("swiglu", reason);
  }
  return swiglu_reference(gate, up);
}

}  // namespace longhaul::ops
