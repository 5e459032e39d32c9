#include "longhaul/ops/lightning_indexer/lightning_indexer.h"

#include <ATen/ATen.h>

#include "longhaul/base/error.h"
#include "longhaul/ops/common.h"
#include "longhaul/ops/cpu/tensors.h"

namespace longhaul::ops {
namespace {

std::string why_not_fused(const Tensor& query) {
  if (query.size(2) > 128) return "it has at most 128 heads";
  return why_no_cpu_kernel(query);
}

IndexerSelection fused(const Tensor& query_BSHD, const Tensor& key_BSD, const Tensor& weights_BSH,
                       const Tensor& doc_start_BS, int64_t K) {
  const at::NoGradGuard no_grad;
  const int64_t B = query_BSHD.size(0), S = query_BSHD.size(1), L = key_BSD.size(1);
  IndexerSelection selection = {
      .indices_BSK = at::empty({B, S, K}, query_BSHD.options().dtype(at::kInt)),
      .scores_BSK = at::empty({B, S, K}, query_BSHD.options().dtype(at::kFloat))};
  if (query_BSHD.is_meta() || selection.indices_BSK.numel() == 0) return selection;
  const Tensor query = pad_last(query_BSHD, 2), key = pad_last(key_BSD, 2);
  const Tensor weights = weights_BSH.to(at::kFloat).contiguous();
  const Tensor first = doc_start_BS.contiguous();
  const Tensor last = at::arange(S, first.options()).expand({B, S}).contiguous();
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

}  // namespace

IndexerSelection lightning_indexer(const Tensor& query_BSHD, const Tensor& key_BSD,
                                   const Tensor& weights_BSH, const Tensor& doc_start_BS,
                                   int64_t topk, Kernel kernel) {
  LONGHAUL_CHECK(topk >= 1, "lightning_indexer: topk is {}, must be at least 1", topk);
  check_dims(query_BSHD, 4, "indexer query");
  const int64_t B = query_BSHD.size(0), S = query_BSHD.size(1);
  check_shape(key_BSD, {B, S, query_BSHD.size(3)}, "indexer key");
  check_shape(weights_BSH, {B, S, query_BSHD.size(2)}, "indexer weights");
  check_shape(doc_start_BS, {B, S}, "lightning_indexer: doc_start");
  if (kernel == Kernel::kFused) {
    const std::string reason = why_not_fused(query_BSHD);
    if (reason.empty()) {
      return fused(query_BSHD, key_BSD, weights_BSH, doc_start_BS, std::min(topk, S));
    }
    report_fallback("lightning_indexer", reason);
  }
  return lightning_indexer_reference(query_BSHD, key_BSD, weights_BSH, doc_start_BS, topk);
}

}  // namespace longhaul::ops
