#include "longhaul/ops/rotary_mul/rotary_mul.h"

#include <torch/csrc/autograd/custom_function.h>

#include "longhaul/ops/common.h"
#include "longhaul/ops/cpu/tensors.h"
#include "longhaul/ops/distributed.h"

namespace longhaul::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

void check(const Tensor& x, const Tensor& cos, const Tensor& sin) {
  LONGHAUL_CHECK(x.dim() >= 3 && x.size(-1) % 2 == 0,
                 "rotary_mul: pairs of x [{}]: expected 3 dimensions or more, the last one even",
                 shape_text(x));
  check_shape(cos, {x.size(0), x.size(1), x.size(-1) / 2}, "rotary_mul: cos");
  check_shape(sin, cos.sizes(), "rotary_mul: sin");
}

Tensor turn(const Tensor& x, const Tensor& cos, const Tensor& sin, RotaryMode mode, bool backward) {
  Tensor out = at::empty(x.sizes(), x.options());
  if (x.is_meta() || x.numel() == 0) return out;
  const int64_t T = x.size(0) * x.size(1), R = x.size(-1), H = x.numel() / (T * R);
  const Tensor x_THR = as_rows(x, {T, H, R});
  const Tensor cos_T = cos.to(at::kFloat).contiguous(), sin_T = sin.to(at::kFloat).contiguous();
  run_kernel("rotary_mul", longhaul_rotary_mul,
             longhaul_rotary_mul_args{.dtype = kernel_dtype(x),
                                      .interleaved = mode == RotaryMode::kInterleaved,
                                      .backward = backward,
                                      .T = T,
                                      .H = H,
                                      .R = R,
                                      .token_stride = x_THR.stride(0),
                                      .head_stride = x_THR.stride(1),
                                      .x = x_THR.const_data_ptr(),
                                      .cos = cos_T.const_data_ptr<float>(),
                                      .sin = sin_T.const_data_ptr<float>(),
                                      .out = out.data_ptr()});
  return out;
}

struct RotaryMul : torch::autograd::Function<RotaryMul> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& cos, const Tensor& sin,
                        int64_t mode) {
    ctx->save_for_backward({cos, sin});
    ctx->saved_data["mode"] = mode;
    return turn(x, cos, sin, static_cast<RotaryMode>(mode), /*backward=*/false);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const auto mode = static_cast<RotaryMode>(ctx->saved_data["mode"].toInt());
    return {turn(grads[0], saved[0], saved[1], mode, /*backward=*/true), Tensor(), Tensor(),
            Tensor()};
  }
};

}  // namespace

Tensor rotary_mul(const Tensor& x, const Tensor& cos, const Tensor& sin, RotaryMode mode,
                  Kernel kernel) {
  if (is_distributed_tensor(x)) {
    using Signature = Tensor(const Tensor&, const Tensor&, const Tensor&, int64_t, int64_t);
    return distributed<Signature>("rotary_mul")
        .call(x, cos, sin, static_cast<int64_t>(mode), static_cast<int64_t>(kernel));
  }
  check(x, cos, sin);
  if (kernel == Kernel::kFused) {
    const std::string reason = why_no_cpu_kernel(x);
    if (reason.empty()) return RotaryMul::apply(x, cos, sin, static_cast<int64_t>(mode));
    report_fallback("rotary_mul", reason);
  }
  return rotary_mul_reference(x, cos, sin, mode);
}

}  // namespace longhaul::ops
