#include "longhaul/ops/lightning_indexer/lightning_indexer.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "longhaul/base/error.h"
#include "longhaul/ops/common.h"
#include "longhaul/ops/cpu/tensors.h"
#include "longhaul/ops/distributed.h"

namespace longhaul::ops {
namespace {

std::string why_not_fused(const Tensor& query) {
  if (query.size(2) > 128) return "it has at most 128 heads";
  return why_no_cpu_kernel(query);
}

IndexerSelection fused(const Tensor& query_BSHD, const Tensor& key_BSD, const Tensor& weights_BSH,
                       const KeyRange& range, int64_t K) {
  const at::NoGradGuard no_grad;
  const int64_t B = query_BSHD.size(0), S = query_BSHD.size(1), L = key_BSD.size(1);
  IndexerSelection selection = {
      .indices_BSK = at::empty({B, S, K}, query_BSHD.options().dtype(at::kInt)),
      .scores_BSK = at::empty({B, S, K}, query_BSHD.options().dtype(at::kFloat))};
  if (query_BSHD.is_meta() || selection.indices_BSK.numel() == 0) return selection;
  const Tensor query = pad_last(query_BSHD, 2), key = pad_last(key_BSD, 2);
  const Tensor weights = weights_BSH.to(at::kFloat).contiguous();
  const Tensor first = range.first_BS.contiguous(), last = range.last().contiguous();
  const longhaul_lightning_indexer_args args = {
      .dtype = kernel_dtype(query),
      .B = B,
      .S = S,
      .L = L,
      .H = query.size(2),
      .D = query.size(3),
      .K = K,
      .query = query.const_data_ptr(),
      .key = key.const_data_ptr(),
      .weights = weights.const_data_ptr<float>(),
      .first_key = first.const_data_ptr<int64_t>(),
      .last_key = last.const_data_ptr<int64_t>(),
      .indices = selection.indices_BSK.data_ptr<int32_t>(),
      .scores = selection.scores_BSK.data_ptr<float>()};
  run_kernel("lightning_indexer", longhaul_lightning_indexer, longhaul_lightning_indexer_workspace,
             args);
  return selection;
}

IndexerInputs fused_grad(const IndexerInputs& in, const Tensor& indices_BSK,
                         const Tensor& d_scores_BSK) {
  const int64_t D = in.query_BSHD.size(3);
  if (in.query_BSHD.is_meta() || indices_BSK.numel() == 0) {
    return {at::zeros_like(in.query_BSHD), at::zeros_like(in.key_BSD),
            at::zeros_like(in.weights_BSH)};
  }
  const Tensor query = pad_last(in.query_BSHD, kKernelColumns),
               key = pad_last(in.key_BSD, kKernelColumns);
  const Tensor weights = in.weights_BSH.to(at::kFloat).contiguous();
  const Tensor indices = to_int32(indices_BSK);
  const Tensor d_scores = d_scores_BSK.to(at::kFloat).contiguous();
  const Tensor d_query = at::empty(query.sizes(), query.options());
  const Tensor d_key = at::empty(key.sizes(), key.options());
  const Tensor d_weights = at::empty(weights.sizes(), weights.options());
  run_kernel("lightning_indexer_grad", longhaul_lightning_indexer_grad,
             longhaul_lightning_indexer_grad_workspace,
             longhaul_lightning_indexer_grad_args{.dtype = kernel_dtype(query),
                                                  .B = query.size(0),
                                                  .S = query.size(1),
                                                  .L = key.size(1),
                                                  .H = query.size(2),
                                                  .D = query.size(3),
                                                  .K = indices.size(2),
                                                  .query = query.const_data_ptr(),
                                                  .key = key.const_data_ptr(),
                                                  .weights = weights.const_data_ptr<float>(),
                                                  .indices = indices.const_data_ptr<int32_t>(),
                                                  .d_scores = d_scores.const_data_ptr<float>(),
                                                  .d_query = d_query.data_ptr(),
                                                  .d_key = d_key.data_ptr(),
                                                  .d_weights = d_weights.data_ptr<float>()});
  return {d_query.narrow(-1, 0, D).contiguous(), d_key.narrow(-1, 0, D).contiguous(),
          d_weights.to(in.weights_BSH.scalar_type())};
}

}  // namespace

void check_indexer_inputs(const IndexerInputs& in) {
  const Tensor& q = in.query_BSHD;
  check_dims(q, 4, "indexer query");
  check_shape(in.key_BSD, {q.size(0), kAnySize, q.size(3)}, "indexer key");
  check_same_dtype(in.key_BSD, q, "indexer key", "the query");
  check_shape(in.weights_BSH, {q.size(0), q.size(1), q.size(2)}, "indexer weights");
  check_is_floating(in.weights_BSH, "indexer weights");
}

std::string why_no_fused_indexer_grad(const IndexerInputs& in) {
  if (in.query_BSHD.size(2) > 128) return "it has at most 128 heads";
  return why_no_cpu_kernel(in.query_BSHD);
}

IndexerInputs lightning_indexer_grad(const IndexerInputs& in, const Tensor& indices_BSK,
                                     const Tensor& d_scores_BSK, Kernel kernel) {
  check_indexer_inputs(in);
  check_shape(indices_BSK, {in.query_BSHD.size(0), in.query_BSHD.size(1), kAnySize},
              "indexer gradient: indices");
  check_is_integer(indices_BSK, "indexer gradient: indices");
  check_shape(d_scores_BSK, indices_BSK.sizes(), "indexer gradient: d_scores");
  if (kernel == Kernel::kFused) {
    const std::string reason = why_no_fused_indexer_grad(in);
    if (reason.empty()) return fused_grad(in, indices_BSK, d_scores_BSK);
    report_fallback("lightning_indexer_grad", reason);
  }
  return lightning_indexer_grad_reference(in, indices_BSK, d_scores_BSK);
}

IndexerSelection lightning_indexer(const Tensor& query_BSHD, const Tensor& key_BSD,
                                   const Tensor& weights_BSH, const KeyRange& range, int64_t topk,
                                   Kernel kernel) {
  if (is_distributed_tensor(query_BSHD)) {
    using Signature =
        std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                   const std::optional<Tensor>&, int64_t, int64_t);
    const auto [indices, scores] =
        distributed<Signature>("lightning_indexer")
            .call(query_BSHD, key_BSD, weights_BSH, range.first_BS, given(range.last_BS), topk,
                  static_cast<int64_t>(kernel));
    return {indices, scores};
  }
  LONGHAUL_CHECK(topk >= 1, "lightning_indexer: topk: expected at least 1, got {}", topk);
  check_indexer_inputs({query_BSHD, key_BSD, weights_BSH});
  const int64_t B = query_BSHD.size(0), S = query_BSHD.size(1), L = key_BSD.size(1);
  check_key_range(range, {B, S}, L, "lightning_indexer: doc_start");
  if (kernel == Kernel::kFused) {
    const std::string reason = why_not_fused(query_BSHD);
    if (reason.empty()) {
      return fused(query_BSHD, key_BSD, weights_BSH, range, std::min(topk, L));
    }
    report_fallback("lightning_indexer", reason);
  }
  return lightning_indexer_reference(query_BSHD, key_BSD, weights_BSH, range, topk);
}

}  // namespace longhaul::ops
