#include "longhaul/ops/cross_entropy/cross_entropy.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "longhaul/ops/common.h"
#include "longhaul/ops/cpu/tensors.h"
#include "longhaul/ops/distributed.h"
#include "longhaul/ops/matmul/matmul.h"

namespace longhaul::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The gradients are computed with the loss, while the logits are there: a loss is a sum, so that
// all that backward brings is a factor. Two cores of Zen 5, 1024 tokens, D 512, V 8192,
// milliseconds of CPU time a core: fp32 130 with 125 of them in the products, bf16 76 with 68;
// without the gradients the loss takes 42 and 24, which is what computing the logits once more
// would add.
// The tile: with V 32000 and 16, 64, 256 MiB (all 1024 tokens at once in bf16 from 64 on) fp32
// takes 545, 526, 504, bf16 312, 276, 275.
constexpr int64_t kTileBytes = int64_t{64} << 20;    // of logits that exist at a time
constexpr int64_t kPieceBytes = int64_t{512} << 10;  // of a product on its way to fp32 sums

// As many as the tile has room for: the more, the fewer times dW is read and written.
// bf16 counts as fp32, which a product may pass through (see ops/matmul).
int64_t tokens_at_a_time(const Tensor& hidden_TD, int64_t V) {
  const int64_t row_bytes = std::max<int64_t>(V, 1) * 4;
  return std::clamp<int64_t>(kTileBytes / row_bytes, 1, std::max<int64_t>(hidden_TD.size(0), 1));
}

using Wanted = WantedOfCrossEntropy;
using Result = CrossEntropyGradients;

// sum += a b (= where `first`) for an fp32 sum of products of bf16: a piece is rounded once, as any
// product in bf16 is, and added while it is in the caches.
void add_rounded_product(const Tensor& a_VR, const Tensor& b_RD, Tensor& sum_VD, bool first) {
  const int64_t V = a_VR.size(0), row_bytes = std::max<int64_t>(1, b_RD.size(1) * 2);
  const int64_t rows = std::max<int64_t>(kPieceBytes / row_bytes, 64);
  for (int64_t from = 0; from < V; from += rows) {
    const int64_t count = std::min(rows, V - from);
    const Tensor piece = product(a_VR.narrow(0, from, count), b_RD);
    const Tensor to = sum_VD.narrow(0, from, count);
    first ? to.copy_(piece) : to.add_(piece);
  }
}

void add_product(const Tensor& a_VR, const Tensor& b_RD, Tensor& sum_VD, bool first) {
  if (a_VR.scalar_type() == at::kFloat) {
    product_out(a_VR, b_RD, sum_VD, first ? 0.0F : 1.0F);
  } else {
    add_rounded_product(a_VR, b_RD, sum_VD, first);
  }
}

void replace_by_gradient(const Tensor& logits_RV, const Tensor& labels_R, const Tensor& loss_R,
                         bool gradient) {
  run_kernel("linear_cross_entropy", longhaul_cross_entropy,
             longhaul_cross_entropy_args{.dtype = kernel_dtype(logits_RV),
                                         .gradient = gradient,
                                         .rows = logits_RV.size(0),
                                         .V = logits_RV.size(1),
                                         .stride = logits_RV.stride(0),
                                         .logits = logits_RV.data_ptr(),
                                         .labels = labels_R.const_data_ptr<int64_t>(),
                                         .loss = loss_R.data_ptr<float>()});
}

// In order, so that it does not depend on the number of threads.
Tensor sum_in_order(const Tensor& loss_T) {
  const float* loss = loss_T.const_data_ptr<float>();
  double sum = 0;
  for (int64_t t = 0; t < loss_T.numel(); ++t) sum += loss[t];
  return at::scalar_tensor(sum, loss_T.options());
}

Result empty_result(const Tensor& hidden_TD, const Tensor& weight_VD, const Wanted& wanted) {
  const auto fp32 = hidden_TD.options().dtype(at::kFloat);
  Result result = {at::zeros({}, fp32), {}, {}};
  if (wanted.d_hidden) result.d_hidden_TD = at::empty(hidden_TD.sizes(), hidden_TD.options());
  if (wanted.d_weight) {
    // Without a token nothing is written.
    result.d_weight_VD = hidden_TD.size(0) == 0 ? at::zeros(weight_VD.sizes(), fp32)
                                                : at::empty(weight_VD.sizes(), fp32);
  }
  return result;
}

Result compute(const Tensor& hidden_TD, const Tensor& weight_VD, const Tensor& labels_T,
               const Wanted& wanted) {
  Result result = empty_result(hidden_TD, weight_VD, wanted);
  if (hidden_TD.is_meta()) return result;
  const int64_t T = hidden_TD.size(0), V = weight_VD.size(0);
  const int64_t most = tokens_at_a_time(hidden_TD, V);
  const Tensor tile = at::empty({most, V}, hidden_TD.options());
  const Tensor loss_T = at::empty({T}, result.loss.options()), labels = labels_T.contiguous();
  for (int64_t from = 0; from < T; from += most) {
    const int64_t count = std::min(most, T - from);
    const Tensor hidden = hidden_TD.narrow(0, from, count);
    Tensor logits = tile.narrow(0, 0, count);
    product_out(hidden, weight_VD.t(), logits);
    replace_by_gradient(logits, labels.narrow(0, from, count), loss_T.narrow(0, from, count),
                        wanted.any());
    if (wanted.d_hidden) {
      Tensor d_hidden = result.d_hidden_TD.narrow(0, from, count);
      product_out(logits, weight_VD, d_hidden);
    }
    if (wanted.d_weight) add_product(logits.t(), hidden, result.d_weight_VD, from == 0);
  }
  result.loss = sum_in_order(loss_T);
  return result;
}

// The gradients are scaled in place and leave the node.
Tensor taken_and_scaled(AutogradContext* ctx, const char* name, const Tensor& scale) {
  const auto found = ctx->saved_data.find(name);
  if (found == ctx->saved_data.end()) return {};
  Tensor gradient = found->second.toTensor();
  ctx->saved_data.erase(found);
  return gradient.mul_(scale);
}

struct LinearCrossEntropy : torch::autograd::Function<LinearCrossEntropy> {
  static Tensor forward(AutogradContext* ctx, const Tensor& hidden_TD, const Tensor& weight_VD,
                        const Tensor& labels_T, const Wanted& wanted) {
    const Tensor weight = weight_VD.to(hidden_TD.scalar_type());
    const Result result = compute(hidden_TD, weight, labels_T, wanted);
    if (wanted.d_hidden) ctx->saved_data["d_hidden"] = result.d_hidden_TD;
    if (wanted.d_weight) ctx->saved_data["d_weight"] = result.d_weight_VD;
    ctx->saved_data["weight_dtype"] = weight_VD.scalar_type();
    return result.loss;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    LONGHAUL_CHECK(
        ctx->saved_data.count("d_hidden") + ctx->saved_data.count("d_weight") > 0,
        "linear_cross_entropy: its gradients were handed out already; the fused kernel's "
        "loss can be differentiated once");
    const Tensor d_hidden = taken_and_scaled(ctx, "d_hidden", grads[0]);
    Tensor d_weight = taken_and_scaled(ctx, "d_weight", grads[0]);
    if (d_weight.defined()) d_weight = d_weight.to(ctx->saved_data["weight_dtype"].toScalarType());
    return {d_hidden, d_weight, Tensor(), Tensor()};
  }
};

Tensor fused(const Tensor& hidden_TD, const Tensor& weight_VD, const Tensor& labels_T) {
  const bool learning = at::GradMode::is_enabled();
  const Wanted wanted = {.d_hidden = learning && hidden_TD.requires_grad(),
                         .d_weight = learning && weight_VD.requires_grad()};
  if (wanted.any()) return LinearCrossEntropy::apply(hidden_TD, weight_VD, labels_T, wanted);
  return compute(hidden_TD, weight_VD.to(hidden_TD.scalar_type()), labels_T, wanted).loss;
}

}  // namespace

LabelledTokens labelled_tokens(const Tensor& hidden, const Tensor& labels) {
  if (labels.dim() > 1) {
    check_shape(labels, hidden.sizes().slice(0, hidden.dim() - 1), "cross-entropy: labels");
  }
  return {hidden.dim() > 2 ? hidden.flatten(0, -2) : hidden,
          labels.dim() > 1 ? labels.flatten() : labels};
}

CrossEntropyGradients linear_cross_entropy_gradients(const Tensor& hidden_TD,
                                                     const Tensor& weight_VD,
                                                     const Tensor& labels_T,
                                                     WantedOfCrossEntropy wanted) {
  check_cross_entropy(hidden_TD, weight_VD, labels_T);
  return compute(hidden_TD, weight_VD.to(hidden_TD.scalar_type()), labels_T, wanted);
}

Tensor linear_cross_entropy(const Tensor& hidden, const Tensor& weight_VD, const Tensor& labels,
                            Kernel kernel) {
  if (is_distributed_tensor(hidden)) {
    using Signature = Tensor(const Tensor&, const Tensor&, const Tensor&, int64_t);
    return distributed<Signature>("linear_cross_entropy")
        .call(hidden, weight_VD, labels, static_cast<int64_t>(kernel));
  }
  const auto [hidden_TD, labels_T] = labelled_tokens(hidden, labels);
  check_cross_entropy(hidden_TD, weight_VD, labels_T);
  if (kernel == Kernel::kFused) {
    const std::string reason = why_no_cpu_kernel(hidden_TD);
    if (reason.empty()) return fused(hidden_TD, weight_VD, labels_T);
    report_fallback("linear_cross_entropy", reason);
  }
  return linear_cross_entropy_reference(hidden_TD, weight_VD, labels_T);
}

}  // namespace longhaul::ops
