#include "longhaul/ops/indexer_kl_loss/indexer_kl_loss.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include "longhaul/ops/common.h"
#include "longhaul/ops/cpu/tensors.h"
#include "longhaul/ops/distributed.h"
#include "longhaul/ops/indexer_kl_loss/kl_gradients.h"

namespace longhaul::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

std::string why_not_fused(const IndexerInputs& in, const KlTarget& target) {
  if (!target.indices_BSK.defined()) {
    return "it makes the head sum of all visible keys itself, from the attention's state";
  }
  return why_no_fused_indexer_grad(in);
}

KlGradients fused(const IndexerInputs& in, const KlTarget& target, bool with_grads) {
  const int64_t B = in.query_BSHD.size(0), S = in.query_BSHD.size(1), D = in.query_BSHD.size(3);
  const auto fp32 = in.query_BSHD.options().dtype(at::kFloat);
  const Tensor loss_BS = at::zeros({B, S}, fp32);
  if (in.query_BSHD.is_meta() || target.indices_BSK.numel() == 0) {
    if (!with_grads) return {loss_BS.sum(), {}};
    return {loss_BS.sum(),
            {at::zeros_like(in.query_BSHD), at::zeros_like(in.key_BSD),
             at::zeros_like(in.weights_BSH)}};
  }
  const Tensor query = pad_last(in.query_BSHD, kKernelColumns),
               key = pad_last(in.key_BSD, kKernelColumns);
  const Tensor weights = in.weights_BSH.to(at::kFloat).contiguous();
  const Tensor indices = to_int32(target.indices_BSK);
  const Tensor head_sum = target.head_sum.to(at::kFloat).contiguous();
  const Tensor scores =
      target.scores_BSK.defined() ? target.scores_BSK.to(at::kFloat).contiguous() : Tensor();
  Tensor d_query, d_key, d_weights;
  if (with_grads) {
    d_query = at::empty(query.sizes(), query.options());
    d_key = at::empty(key.sizes(), key.options());
    d_weights = at::empty(weights.sizes(), fp32);
  }
  run_kernel("sparse_indexer_kl_loss", longhaul_indexer_kl_loss, longhaul_indexer_kl_loss_workspace,
             longhaul_indexer_kl_loss_args{
                 .dtype = kernel_dtype(query),
                 .B = B,
                 .S = S,
                 .L = key.size(1),
                 .H = query.size(2),
                 .D = query.size(3),
                 .K = indices.size(2),
                 .query = query.const_data_ptr(),
                 .key = key.const_data_ptr(),
                 .weights = weights.const_data_ptr<float>(),
                 .indices = indices.const_data_ptr<int32_t>(),
                 .scores = scores.defined() ? scores.const_data_ptr<float>() : nullptr,
                 .head_sum = head_sum.const_data_ptr<float>(),
                 .loss = loss_BS.data_ptr<float>(),
                 .d_query = with_grads ? d_query.data_ptr() : nullptr,
                 .d_key = with_grads ? d_key.data_ptr() : nullptr,
                 .d_weights = with_grads ? d_weights.data_ptr<float>() : nullptr});
  if (!with_grads) return {loss_BS.sum(), {}};
  return {loss_BS.sum(),
          {d_query.narrow(-1, 0, D).contiguous(), d_key.narrow(-1, 0, D).contiguous(),
           d_weights.to(in.weights_BSH.scalar_type())}};
}

struct KlLoss : torch::autograd::Function<KlLoss> {
  static Tensor forward(AutogradContext* ctx, const Tensor& /*query*/, const Tensor& /*key*/,
                        const Tensor& /*weights*/, const std::function<KlGradients(bool)>& compute,
                        bool with_grads) {
    const auto result = compute(with_grads);
    if (with_grads) {
      ctx->save_for_backward(
          {result.grads.query_BSHD, result.grads.key_BSD, result.grads.weights_BSH});
    }
    return result.loss;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    variable_list result(5);
    // Multiplied in fp32 also where the gradients are bf16, by a factor that keeps its dtype: in
    // bf16 1/T alone would be off by up to 0.4%.
    for (size_t i = 0; i < saved.size(); ++i) result[i] = saved[i] * grads[0];
    return result;
  }
};

// Throws Error for shapes that do not fit.
void check_target(const IndexerInputs& in, const KlTarget& target) {
  check_indexer_inputs(in);
  const int64_t B = in.query_BSHD.size(0), S = in.query_BSHD.size(1);
  if (target.indices_BSK.defined()) {
    check_shape(target.indices_BSK, {B, S, kAnySize}, "indexer loss: keys");
    check_is_integer(target.indices_BSK, "indexer loss: keys");
    check_shape(target.head_sum, target.indices_BSK.sizes(), "indexer loss: head sum");
    if (target.scores_BSK.defined()) {
      check_shape(target.scores_BSK, target.indices_BSK.sizes(), "indexer loss: scores");
    }
  } else {
    check_shape(target.doc_start_BS, {B, S}, "indexer loss: doc_start");
    check_shape(target.head_sum, {B, S, S}, "indexer loss: head sum");
  }
  check_is_floating(target.head_sum, "indexer loss: head sum");
}

KlGradients compute(const IndexerInputs& in, const KlTarget& target, Kernel kernel,
                    bool with_grads) {
  if (kernel == Kernel::kFused) {
    const std::string reason = why_not_fused(in, target);
    if (reason.empty()) return fused(in, target, with_grads);
    report_fallback("indexer_kl_loss", reason);
  }
  return indexer_kl_reference(in, target, with_grads);
}

Tensor apply(const IndexerInputs& in, const KlTarget& target, Kernel kernel) {
  check_target(in, target);
  return loss_with_gradients(
      in, [&](bool with_grads) { return compute(in, target, kernel, with_grads); });
}

}  // namespace

KlGradients sparse_indexer_kl_gradients(const IndexerInputs& indexer, const Tensor& indices_BSK,
                                        const Tensor& head_sum_BSK, Kernel kernel) {
  const at::NoGradGuard no_grad;
  const KlTarget target = {
      .indices_BSK = indices_BSK, .doc_start_BS = {}, .head_sum = head_sum_BSK, .scores_BSK = {}};
  check_target(indexer, target);
  return compute(indexer, target, kernel, /*with_grads=*/true);
}

Tensor loss_with_gradients(const IndexerInputs& in,
                           const std::function<KlGradients(bool with_grads)>& compute) {
  const bool with_grads =
      at::GradMode::is_enabled() && (in.query_BSHD.requires_grad() || in.key_BSD.requires_grad() ||
                                     in.weights_BSH.requires_grad());
  return KlLoss::apply(in.query_BSHD, in.key_BSD, in.weights_BSH, compute, with_grads);
}

Tensor sparse_indexer_kl_loss(const IndexerInputs& indexer, const Tensor& indices_BSK,
                              const Tensor& head_sum_BSK, Kernel kernel, const Tensor& scores_BSK) {
  if (is_distributed_tensor(indexer.query_BSHD)) {
    using Signature = Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                             const Tensor&, const std::optional<Tensor>&, int64_t);
    return distributed<Signature>("sparse_indexer_kl_loss")
        .call(indexer.query_BSHD, indexer.key_BSD, indexer.weights_BSH, indices_BSK, head_sum_BSK,
              given(scores_BSK), static_cast<int64_t>(kernel));
  }
  return apply(indexer,
               {.indices_BSK = indices_BSK,
                .doc_start_BS = {},
                .head_sum = head_sum_BSK,
                .scores_BSK = scores_BSK},
               kernel);
}

Tensor dense_indexer_kl_loss(const IndexerInputs& indexer, const Tensor& doc_start_BS,
                             const Tensor& head_sum_BSS, Kernel kernel) {
  return apply(
      indexer,
      {.indices_BSK = {}, .doc_start_BS = doc_start_BS, .head_sum = head_sum_BSS, .scores_BSK = {}},
      kernel);
}

}  // namespace longhaul::ops
