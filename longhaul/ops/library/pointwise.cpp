// rms_norm, add_rms_norm, rotary_mul and swiglu.
#include <ATen/ExpandUtils.h>

#include "longhaul/ops/library/operators.h"
#include "longhaul/ops/rms_norm/rms_norm.h"
#include "longhaul/ops/rotary_mul/rotary_mul.h"
#include "longhaul/ops/swiglu/swiglu.h"

namespace longhaul::ops::library {
namespace {

namespace cpu {

void check_rows(const Tensor& x, const char* what) {
  check_is_floating(x, what);
  LONGHAUL_CHECK(x.dim() > 0, "{}: expected at least 1 dimension, got [{}]", what, shape_text(x));
}

// [..., 1] of the rows' statistics.
Tensor by_row(const Tensor& rstd, const Tensor& x) {
  auto sizes = x.sizes().vec();
  sizes.back() = 1;
  return rstd.view(sizes);
}

std::tuple<Tensor, Tensor> rms_norm(const Tensor& input, const Tensor& gamma, double epsilon) {
  check_rows(input, "rms_norm: input");
  check_shape(gamma, {input.size(-1)}, "rms_norm: gamma");
  const NormForward out = rms_norm_forward(input, {}, gamma, epsilon);
  return {out.y, by_row(out.rstd, input)};
}

std::tuple<Tensor, Tensor> add_rms_norm_backward(const Tensor& dy, const Tensor& x,
                                                 const Tensor& gamma, const Tensor& rstd,
                                                 const MaybeTensor& d_x) {
  check_rows(x, "gradient of rms_norm: x");
  check_shape(gamma, {x.size(-1)}, "gradient of rms_norm: gamma");
  check_shape(dy, x.sizes(), "gradient of rms_norm: dy");
  const int64_t rows = c10::multiply_integers(x.sizes().slice(0, x.dim() - 1));
  LONGHAUL_CHECK(rstd.numel() == rows && rstd.scalar_type() == wide_type(x),
                 "gradient of rms_norm: rstd: expected {} numbers in {}, got {} in {}", rows,
                 c10::toString(wide_type(x)), rstd.numel(), c10::toString(rstd.scalar_type()));
  if (d_x) check_shape(*d_x, x.sizes(), "add_rms_norm_backward: d_x");
  const auto dtype = x.scalar_type();
  const auto result =
      rms_norm_grad(dy.to(dtype), x, gamma, rstd.contiguous(), d_x ? d_x->to(dtype) : Tensor());
  return {result.d_x, result.d_weight};
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& dy, const Tensor& input,
                                             const Tensor& gamma, const Tensor& rstd) {
  return add_rms_norm_backward(dy, input, gamma, rstd, std::nullopt);
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm(const Tensor& x1, const Tensor& x2,
                                                const Tensor& gamma, double epsilon) {
  check_rows(x1, "add_rms_norm: x1");
  check_shape(gamma, {x1.size(-1)}, "add_rms_norm: gamma");
  check_shape(x2, x1.sizes(), "add_rms_norm: x2");
  check_same_dtype(x2, x1, "add_rms_norm: x2", "x1");
  const NormForward out = rms_norm_forward(x1, x2, gamma, epsilon);
  return {out.y, by_row(out.rstd, x1), out.sum};
}

// The angles [..., R / 2] of `x` [..., R], which has each for both elements of its pair.
Tensor angles_of_pairs(const Tensor& x, RotaryMode mode, const char* what) {
  const int64_t R = x.size(-1);
  const bool half = mode == RotaryMode::kHalfSplit;
  const Tensor first = half ? x.narrow(-1, 0, R / 2) : x.slice(-1, 0, R, 2);
  const Tensor second = half ? x.narrow(-1, R / 2, R / 2) : x.slice(-1, 1, R, 2);
  if (!at::equal(first, second)) {
    const Tensor differs = first.ne(second), place = differs.nonzero()[0];
    LONGHAUL_CHECK(false,
                   "{}: expected the same number for both elements of a pair, got {} and {} for "
                   "pair {} of row {}",
                   what, first.masked_select(differs)[0].item<double>(),
                   second.masked_select(differs)[0].item<double>(), place[-1].item<int64_t>(),
                   place[-3].item<int64_t>());
  }
  return first;
}

// cos and sin as Ascend has them: [B, S, 1, R] or [1, S, 1, R], each angle for both elements of its
// pair.
struct Rotation {
  Tensor cos, sin;  // [B, S, R / 2]
  RotaryMode mode;
  bool packed;  // [T, heads, R] without B

  Rotation(const Tensor& input, const Tensor& r1, const Tensor& r2, std::string_view name)
      : packed(input.dim() == 3) {
    const bool half = name == "half";
    LONGHAUL_CHECK(half || name == "interleave",
                   "rotary_mul: rotary_mode: expected 'half' or 'interleave', got '{}'", name);
    mode = half ? RotaryMode::kHalfSplit : RotaryMode::kInterleaved;
    LONGHAUL_CHECK((packed || input.dim() == 4) && input.size(-1) % 2 == 0,
                   "rotary_mul: input: expected 3 or 4 dimensions, the last one even, got [{}]",
                   shape_text(input));
    cos = angles(input, r1, "rotary_mul: r1");
    sin = angles(input, r2, "rotary_mul: r2");
  }

  Tensor angles(const Tensor& input, const Tensor& x, const char* what) const {
    auto sizes = input.sizes().vec();
    sizes[sizes.size() - 2] = 1;
    const bool for_all_rows = !packed && x.dim() == 4 && x.size(0) == 1;
    if (for_all_rows) sizes[0] = 1;
    check_shape(x, sizes, what);
    const Tensor pairs = rows_of(angles_of_pairs(x, mode, what).squeeze(-2));
    return for_all_rows ? pairs.expand({input.size(0), -1, -1}) : pairs;
  }
  Tensor rows_of(const Tensor& x) const { return packed ? x.unsqueeze(0) : x; }
  Tensor of(const Tensor& x, const Tensor& by_sin) const {
    const Tensor y = ops::rotary_mul(rows_of(x), cos, by_sin, mode, Kernel::kFused);
    return packed ? y.squeeze(0) : y;
  }
};

Tensor rotary_mul(const Tensor& input, const Tensor& r1, const Tensor& r2,
                  std::string_view rotary_mode, const MaybeTensor& rotate) {
  check_absent("rotary_mul", "rotate", rotate);
  const Rotation rotation(input, r1, r2, rotary_mode);
  return rotation.of(input, rotation.sin);
}

// What r2 is multiplied by.
Tensor turned(const Tensor& x, RotaryMode mode) {
  const int64_t R = x.size(-1);
  if (mode == RotaryMode::kHalfSplit) {
    return at::cat({x.narrow(-1, R / 2, R / 2).neg(), x.narrow(-1, 0, R / 2)}, -1);
  }
  return at::stack({x.slice(-1, 1, R, 2).neg(), x.slice(-1, 0, R, 2)}, -1).flatten(-2);
}

std::tuple<Tensor, Tensor, Tensor> rotary_mul_backward(const Tensor& grad, const Tensor& input,
                                                       const Tensor& r1, const Tensor& r2,
                                                       std::string_view rotary_mode) {
  const Rotation rotation(input, r1, r2, rotary_mode);
  check_shape(grad, input.sizes(), "rotary_mul_backward: grad");
  const auto wide = wide_type(input);
  const Tensor x = input.to(wide), dy = grad.to(wide);
  // Over heads, and over the rows that share their angles.
  const auto summed = [](const Tensor& product, const Tensor& angles) {
    return at::sum_to(product, angles.sizes()).to(angles.scalar_type());
  };
  return {rotation.of(grad, rotation.sin.neg()), summed(dy * x, r1),
          summed(dy * turned(x, rotation.mode), r2)};
}

// Rows whose first half is the gate: those in front of `dim` make up the rows.
struct GatedRows {
  int64_t dim, rows, width;  // of a row

  GatedRows(const Tensor& x, int64_t some_dim) {
    check_rows(x, "swiglu: input");
    LONGHAUL_CHECK(-x.dim() <= some_dim && some_dim < x.dim(),
                   "swiglu: dim: expected {} to {}, got {}", -x.dim(), x.dim() - 1, some_dim);
    dim = at::maybe_wrap_dim(some_dim, x.dim());
    LONGHAUL_CHECK(x.size(dim) % 2 == 0,
                   "swiglu: input: expected an even size in dimension {}, got [{}]", some_dim,
                   shape_text(x));
    rows = c10::multiply_integers(x.sizes().slice(0, dim));
    width = c10::multiply_integers(x.sizes().slice(dim));
  }

  std::vector<int64_t> result_sizes(const Tensor& x) const {
    auto sizes = x.sizes().vec();
    sizes[dim] /= 2;
    return sizes;
  }
  Tensor gate(const Tensor& x) const { return as_rows(x, {rows, width}).narrow(1, 0, width / 2); }
  Tensor up(const Tensor& x) const {
    return as_rows(x, {rows, width}).narrow(1, width / 2, width / 2);
  }
};

Tensor swiglu(const Tensor& input, int64_t dim) {
  const GatedRows halves(input, dim);
  const Tensor gate = halves.gate(input), up = halves.up(input);
  const bool fused = takes_kernel("swiglu", why_no_cpu_kernel(input));
  return (fused ? swiglu_rows(gate, up) : swiglu_reference(gate, up))
      .view(halves.result_sizes(input));
}

Tensor swiglu_backward(const Tensor& grad_output, const Tensor& input, int64_t dim) {
  const GatedRows halves(input, dim);
  check_shape(grad_output, halves.result_sizes(input), "swiglu_backward: grad_output");
  const Tensor dy = as_rows(grad_output.to(input.scalar_type()), {halves.rows, halves.width / 2});
  const Tensor d_input = at::empty(input.sizes(), input.options());
  const Tensor d_gate = halves.gate(d_input), d_up = halves.up(d_input);
  if (takes_kernel("swiglu_backward", why_no_cpu_kernel(input))) {
    swiglu_rows_grad(dy, halves.gate(input), halves.up(input), d_gate, d_up);
  } else {
    const auto gradients = reference_gradients(
        [](const std::vector<Tensor>& x) { return swiglu_reference(x[0], x[1]); },
        {halves.gate(input), halves.up(input)}, dy);
    d_gate.copy_(gradients[0]);
    d_up.copy_(gradients[1]);
  }
  return d_input;
}

}  // namespace cpu

namespace meta {

Tensor rstd_of(const Tensor& x) {
  SymSizes sizes = x.sym_sizes().vec();
  sizes.back() = 1;
  return sized(x, sizes, wide_type(x));
}

std::tuple<Tensor, Tensor> rms_norm(const Tensor& input, const Tensor& /*gamma*/,
                                    double /*epsilon*/) {
  return {sized_like(input), rstd_of(input)};
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& /*dy*/, const Tensor& input,
                                             const Tensor& gamma, const Tensor& /*rstd*/) {
  return {sized_like(input), sized_like(gamma)};
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm(const Tensor& x1, const Tensor& /*x2*/,
                                                const Tensor& /*gamma*/, double /*epsilon*/) {
  return {sized_like(x1), rstd_of(x1), sized_like(x1)};
}

std::tuple<Tensor, Tensor> add_rms_norm_backward(const Tensor& /*dy*/, const Tensor& x,
                                                 const Tensor& gamma, const Tensor& /*rstd*/,
                                                 const MaybeTensor& /*d_x*/) {
  return {sized_like(x), sized_like(gamma)};
}

Tensor rotary_mul(const Tensor& input, const Tensor& /*r1*/, const Tensor& /*r2*/,
                  std::string_view /*rotary_mode*/, const MaybeTensor& /*rotate*/) {
  return sized_like(input);
}

std::tuple<Tensor, Tensor, Tensor> rotary_mul_backward(const Tensor& /*grad*/, const Tensor& input,
                                                       const Tensor& r1, const Tensor& r2,
                                                       std::string_view /*rotary_mode*/) {
  return {sized_like(input), sized_like(r1), sized_like(r2)};
}

Tensor swiglu(const Tensor& input, int64_t dim) {
  SymSizes sizes = input.sym_sizes().vec();
  auto& halved = sizes[at::maybe_wrap_dim(dim, input.dim())];
  halved = halved / 2;
  return sized(input, sizes, input.scalar_type());
}

Tensor swiglu_backward(const Tensor& /*grad_output*/, const Tensor& input, int64_t /*dim*/) {
  return sized_like(input);
}

}  // namespace meta

namespace autograd {

struct RmsNorm : torch::autograd::Function<RmsNorm> {
  static variable_list forward(AutogradContext* ctx, const Tensor& input, const Tensor& gamma,
                               double epsilon) {
    static const auto op = find_operator<decltype(cpu::rms_norm)>("rms_norm");
    const at::AutoDispatchBelowADInplaceOrView guard;
    const auto [y, rstd] = op.call(input, gamma, epsilon);
    ctx->save_for_backward({input, gamma, rstd});
    ctx->mark_non_differentiable({rstd});
    return {y, rstd};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto op = find_operator<decltype(cpu::rms_norm_backward)>("rms_norm_backward");
    const auto saved = ctx->get_saved_variables();
    const auto [d_input, d_gamma] = op.call(grads[0], saved[0], saved[1], saved[2]);
    return {d_input, d_gamma, Tensor()};
  }
};

std::tuple<Tensor, Tensor> rms_norm(const Tensor& input, const Tensor& gamma, double epsilon) {
  const auto out = RmsNorm::apply(input, gamma, epsilon);
  return {out[0], out[1]};
}

struct AddRmsNorm : torch::autograd::Function<AddRmsNorm> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x1, const Tensor& x2,
                               const Tensor& gamma, double epsilon) {
    static const auto op = find_operator<decltype(cpu::add_rms_norm)>("add_rms_norm");
    const at::AutoDispatchBelowADInplaceOrView guard;
    const auto [y, rstd, x] = op.call(x1, x2, gamma, epsilon);
    ctx->save_for_backward({x, gamma, rstd});
    ctx->mark_non_differentiable({rstd});
    ctx->set_materialize_grads(false);
    return {y, rstd, x};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto op =
        find_operator<decltype(cpu::add_rms_norm_backward)>("add_rms_norm_backward");
    const Tensor &dy = grads[0], &d_sum = grads[2];  // undefined where nothing depends on it
    if (!dy.defined()) return {d_sum, d_sum, Tensor(), Tensor()};
    const auto saved = ctx->get_saved_variables();
    const auto [d_x, d_gamma] = op.call(dy, saved[0], saved[1], saved[2], as_optional(d_sum));
    return {d_x, d_x, d_gamma, Tensor()};
  }
};

std::tuple<Tensor, Tensor, Tensor> add_rms_norm(const Tensor& x1, const Tensor& x2,
                                                const Tensor& gamma, double epsilon) {
  const auto out = AddRmsNorm::apply(x1, x2, gamma, epsilon);
  return {out[0], out[1], out[2]};
}

struct RotaryMul : torch::autograd::Function<RotaryMul> {
  static Tensor forward(AutogradContext* ctx, const Tensor& input, const Tensor& r1,
                        const Tensor& r2, const std::string& mode) {
    static const auto op = find_operator<decltype(cpu::rotary_mul)>("rotary_mul");
    ctx->save_for_backward({input, r1, r2});
    ctx->saved_data["mode"] = mode;
    const at::AutoDispatchBelowADInplaceOrView guard;
    return op.call(input, r1, r2, mode, std::nullopt);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto op = find_operator<decltype(cpu::rotary_mul)>("rotary_mul");
    static const auto grad =
        find_operator<decltype(cpu::rotary_mul_backward)>("rotary_mul_backward");
    const auto saved = ctx->get_saved_variables();
    const std::string mode = ctx->saved_data["mode"].toStringRef();
    if (ctx->needs_input_grad(1) || ctx->needs_input_grad(2)) {
      const auto [d_input, d_r1, d_r2] = grad.call(grads[0], saved[0], saved[1], saved[2], mode);
      return {d_input, d_r1, d_r2, Tensor()};
    }
    // By the negative angle.
    return {op.call(grads[0], saved[1], saved[2].neg(), mode, std::nullopt), Tensor(), Tensor(),
            Tensor()};
  }
};

Tensor rotary_mul(const Tensor& input, const Tensor& r1, const Tensor& r2,
                  std::string_view rotary_mode, const MaybeTensor& rotate) {
  check_absent("rotary_mul", "rotate", rotate);
  return RotaryMul::apply(input, r1, r2, std::string(rotary_mode));
}

struct Swiglu : torch::autograd::Function<Swiglu> {
  static Tensor forward(AutogradContext* ctx, const Tensor& input, int64_t dim) {
    static const auto op = find_operator<decltype(cpu::swiglu)>("swiglu");
    ctx->save_for_backward({input});
    ctx->saved_data["dim"] = dim;
    const at::AutoDispatchBelowADInplaceOrView guard;
    return op.call(input, dim);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto op = find_operator<decltype(cpu::swiglu_backward)>("swiglu_backward");
    return {op.call(grads[0], ctx->get_saved_variables()[0], ctx->saved_data["dim"].toInt()),
            Tensor()};
  }
};

Tensor swiglu(const Tensor& input, int64_t dim) { return Swiglu::apply(input, dim); }

}  // namespace autograd
}  // namespace

TORCH_LIBRARY_FRAGMENT(longhaul, m) {
  m.def("rms_norm(Tensor input, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)", kTags);
  m.def(
      "rms_norm_backward(Tensor dy, Tensor input, Tensor gamma, Tensor rstd) -> "
      "(Tensor, Tensor)",
      kTags);
  m.def(
      "add_rms_norm(Tensor x1, Tensor x2, Tensor gamma, float epsilon=1e-06) -> "
      "(Tensor, Tensor, Tensor)",
      kTags);
  m.def(
      "add_rms_norm_backward(Tensor dy, Tensor x, Tensor gamma, Tensor rstd, Tensor? d_x=None) -> "
      "(Tensor, Tensor)",
      kTags);
  m.def(
      "rotary_mul(Tensor input, Tensor r1, Tensor r2, str rotary_mode='half', "
      "Tensor? rotate=None) -> Tensor",
      kTags);
  m.def(
      "rotary_mul_backward(Tensor grad, Tensor input, Tensor r1, Tensor r2, "
      "str rotary_mode='half') -> (Tensor, Tensor, Tensor)",
      kTags);
  m.def("swiglu(Tensor input, int dim=-1) -> Tensor", kTags);
  m.def("swiglu_backward(Tensor grad_output, Tensor input, int dim=-1) -> Tensor", kTags);
}

TORCH_LIBRARY_IMPL(longhaul, CPU, m) {
  m.impl("rms_norm", cpu::rms_norm);
  m.impl("rms_norm_backward", cpu::rms_norm_backward);
  m.impl("add_rms_norm", cpu::add_rms_norm);
  m.impl("add_rms_norm_backward", cpu::add_rms_norm_backward);
  m.impl("rotary_mul", cpu::rotary_mul);
  m.impl("rotary_mul_backward", cpu::rotary_mul_backward);
  m.impl("swiglu", cpu::swiglu);
  m.impl("swiglu_backward", cpu::swiglu_backward);
}

TORCH_LIBRARY_IMPL(longhaul, Meta, m) {
  m.impl("rms_norm", meta::rms_norm);
  m.impl("rms_norm_backward", meta::rms_norm_backward);
  m.impl("add_rms_norm", meta::add_rms_norm);
  m.impl("add_rms_norm_backward", meta::add_rms_norm_backward);
  m.impl("rotary_mul", meta::rotary_mul);
  m.impl("rotary_mul_backward", meta::rotary_mul_backward);
  m.impl("swiglu", meta::swiglu);
  m.impl("swiglu_backward", meta::swiglu_backward);
}

TORCH_LIBRARY_IMPL(longhaul, Autograd, m) {
  m.impl("rms_norm", autograd::rms_norm);
  m.impl("add_rms_norm", autograd::add_rms_norm);
  m.impl("rotary_mul", autograd::rotary_mul);
  m.impl("swiglu", autograd::swiglu);
  for (const char* gradient :
       {"rms_norm_backward", "add_rms_norm_backward", "rotary_mul_backward", "swiglu_backward"}) {
    m.impl(gradient, torch::autograd::autogradNotImplementedFallback());
  }
}

}  // namespace longhaul::ops::library
