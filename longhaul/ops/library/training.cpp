// linear_cross_entropy and adam_w.
#include <ATen/core/grad_mode.h>

#include "longhaul/ops/adam_w/adam_w.h"
#include "longhaul/ops/cross_entropy/cross_entropy.h"
#include "longhaul/ops/library/operators.h"

namespace longhaul::ops::library {
namespace {

namespace cpu {

Tensor linear_cross_entropy(const Tensor& hidden, const Tensor& weight, const Tensor& labels) {
  const at::NoGradGuard no_grad;
  return ops::linear_cross_entropy(hidden, weight, labels, Kernel::kFused);
}

ThreeTensors by_reference(const Tensor& hidden, const Tensor& weight, const Tensor& labels) {
  const auto loss = [&](const std::vector<Tensor>& x) {
    return linear_cross_entropy_reference(x[0], x[1], labels);
  };
  const Tensor value = loss({hidden, weight});
  const auto d = reference_gradients(loss, {hidden, weight}, at::ones_like(value));
  return {value, d[0], d[1].to(wide_type(hidden))};
}

// Both gradients without the factor that backward brings; d_weight in fp32 (fp64 for fp64).
ThreeTensors linear_cross_entropy_and_grad(const Tensor& rows, const Tensor& weight,
                                           const Tensor& labels_of_rows, Mask2 output_mask) {
  const at::NoGradGuard no_grad;
  const auto [hidden, labels] = labelled_tokens(rows, labels_of_rows);
  Tensor loss, d_hidden, d_weight;
  if (takes_kernel("linear_cross_entropy", why_no_cpu_kernel(hidden))) {
    const auto found = linear_cross_entropy_gradients(
        hidden, weight, labels, {.d_hidden = output_mask[0], .d_weight = output_mask[1]});
    loss = found.loss;
    d_hidden = found.d_hidden_TD;
    d_weight = found.d_weight_VD;
  } else {
    std::tie(loss, d_hidden, d_weight) = by_reference(hidden, weight, labels);
  }
  return {loss, output_mask[0] ? d_hidden.view_as(rows) : no_result(hidden),
          output_mask[1] ? d_weight : no_result(loss)};
}

void adam_w(at::TensorList params, at::TensorList grads, at::TensorList exp_avgs,
            at::TensorList exp_avg_sqs, int64_t step, double lr, double beta1, double beta2,
            double eps, double weight_decay, double grad_scale) {
  const size_t n = params.size();
  LONGHAUL_CHECK(grads.size() == n && exp_avgs.size() == n && exp_avg_sqs.size() == n,
                 "adam_w: {} params, {} grads, {} exp_avgs, {} exp_avg_sqs: expected as many of "
                 "each",
                 n, grads.size(), exp_avgs.size(), exp_avg_sqs.size());
  std::vector<AdamWUpdate> updates;
  for (size_t i = 0; i < n; ++i) {
    updates.push_back({.param = params[i],
                       .grad = grads[i],
                       .exp_avg = exp_avgs[i],
                       .exp_avg_sq = exp_avg_sqs[i],
                       .step = step});
  }
  const at::NoGradGuard no_grad;
  ops::adam_w(updates, {.lr = lr,
                        .beta1 = beta1,
                        .beta2 = beta2,
                        .eps = eps,
                        .weight_decay = weight_decay,
                        .grad_scale = grad_scale});
}

}  // namespace cpu

namespace meta {

Tensor linear_cross_entropy(const Tensor& hidden, const Tensor& /*weight*/,
                            const Tensor& /*labels*/) {
  return sized(hidden, {}, wide_type(hidden));
}

ThreeTensors linear_cross_entropy_and_grad(const Tensor& hidden, const Tensor& weight,
                                           const Tensor& /*labels*/, Mask2 output_mask) {
  const auto wide = wide_type(hidden);
  return {sized(hidden, {}, wide), output_mask[0] ? sized_like(hidden) : no_result(hidden),
          sized(hidden, output_mask[1] ? weight.sym_sizes().vec() : SymSizes{0}, wide)};
}

void adam_w(at::TensorList params, at::TensorList grads, at::TensorList exp_avgs,
            at::TensorList exp_avg_sqs, int64_t /*step*/, double /*lr*/, double /*beta1*/,
            double /*beta2*/, double /*eps*/, double /*weight_decay*/, double /*grad_scale*/) {
  for (const at::TensorList tensors : {params, grads, exp_avgs, exp_avg_sqs}) {
    for (const Tensor& x : tensors) check_is_meta(x);
  }
}

}  // namespace meta

namespace autograd {

// Writes in place: the tensors' versions say so to whoever saved them.
void adam_w(at::TensorList params, at::TensorList grads, at::TensorList exp_avgs,
            at::TensorList exp_avg_sqs, int64_t step, double lr, double beta1, double beta2,
            double eps, double weight_decay, double grad_scale) {
  static const auto op = find_operator<decltype(cpu::adam_w)>("adam_w");
  for (const Tensor& param : params) {
    LONGHAUL_CHECK(!at::GradMode::is_enabled() || !param.requires_grad(),
                   "adam_w: params learn in place, which has no gradient; call it under "
                   "torch.no_grad()");
  }
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    op.call(params, grads, exp_avgs, exp_avg_sqs, step, lr, beta1, beta2, eps, weight_decay,
            grad_scale);
  }
  for (const at::TensorList changed : {params, exp_avgs, exp_avg_sqs}) {
    for (const Tensor& x : changed) torch::autograd::impl::bump_version(x);
  }
}

// The gradients are computed with the loss; all that backward brings is a factor.
struct LinearCrossEntropy : torch::autograd::Function<LinearCrossEntropy> {
  static Tensor forward(AutogradContext* ctx, const Tensor& hidden, const Tensor& weight,
                        const Tensor& labels, bool with_d_hidden, bool with_d_weight) {
    static const auto op = find_operator<decltype(cpu::linear_cross_entropy_and_grad)>(
        "linear_cross_entropy_and_grad");
    const at::AutoDispatchBelowADInplaceOrView guard;
    const auto [loss, d_hidden, d_weight] =
        op.call(hidden, weight, labels, {with_d_hidden, with_d_weight});
    ctx->save_for_backward({d_hidden, d_weight});
    ctx->saved_data["weight_dtype"] = weight.scalar_type();
    return loss;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    LONGHAUL_CHECK(!at::GradMode::is_enabled(),
                   "linear_cross_entropy: its gradients have no derivative: expected "
                   "create_graph=False");
    const auto saved = ctx->get_saved_variables();
    const auto scaled = [&](const Tensor& x, at::ScalarType dtype) {
      return (x.to(grads[0].scalar_type()) * grads[0]).to(dtype);
    };
    variable_list result(5);
    if (ctx->needs_input_grad(0)) result[0] = scaled(saved[0], saved[0].scalar_type());
    if (ctx->needs_input_grad(1)) {
      result[1] = scaled(saved[1], ctx->saved_data["weight_dtype"].toScalarType());
    }
    return result;
  }
};

Tensor linear_cross_entropy(const Tensor& hidden, const Tensor& weight, const Tensor& labels) {
  static const auto op = find_operator<decltype(cpu::linear_cross_entropy)>("linear_cross_entropy");
  const bool learning = at::GradMode::is_enabled();
  const bool d_hidden = learning && hidden.requires_grad();
  const bool d_weight = learning && weight.requires_grad();
  if (d_hidden || d_weight) {
    return LinearCrossEntropy::apply(hidden, weight, labels, d_hidden, d_weight);
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  return op.call(hidden, weight, labels);
}

}  // namespace autograd
}  // namespace

TORCH_LIBRARY_FRAGMENT(longhaul, m) {
  m.def("linear_cross_entropy(Tensor hidden, Tensor weight, Tensor labels) -> Tensor", kTags);
  m.def(
      "linear_cross_entropy_and_grad(Tensor hidden, Tensor weight, Tensor labels, "
      "bool[2] output_mask) -> (Tensor, Tensor, Tensor)",
      kTags);
  m.def(
      "adam_w(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, "
      "Tensor(c!)[] exp_avg_sqs, int step, *, float lr, float beta1=0.9, float beta2=0.95, "
      "float eps=1e-08, float weight_decay=0.1, float grad_scale=1.0) -> ()",
      kTags);
}

TORCH_LIBRARY_IMPL(longhaul, CPU, m) {
  m.impl("linear_cross_entropy", cpu::linear_cross_entropy);
  m.impl("linear_cross_entropy_and_grad", cpu::linear_cross_entropy_and_grad);
  m.impl("adam_w", cpu::adam_w);
}

TORCH_LIBRARY_IMPL(longhaul, Meta, m) {
  m.impl("linear_cross_entropy", meta::linear_cross_entropy);
  m.impl("linear_cross_entropy_and_grad", meta::linear_cross_entropy_and_grad);
  m.impl("adam_w", meta::adam_w);
}

TORCH_LIBRARY_IMPL(longhaul, Autograd, m) {
  m.impl("linear_cross_entropy", autograd::linear_cross_entropy);
  m.impl("adam_w", autograd::adam_w);
  m.impl("linear_cross_entropy_and_grad", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace longhaul::ops::library
