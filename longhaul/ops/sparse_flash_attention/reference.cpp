#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "longhaul/ops/common.h"
#include "longhaul/ops/lightning_indexer/lightning_indexer.h"
#include "longhaul/ops/sparse_flash_attention/sparse_flash_attention.h"

namespace longhaul::ops {

AttentionResult sparse_flash_attention_reference(const Tensor& query_BSHD, const Tensor& key,
                                                 const Tensor& value, const Tensor& indices_BSK,
                                                 const AttentionOptions& options) {
  const Tensor mask = indices_to_mask(indices_BSK, key.size(1));
  AttentionResult result = masked_attention(query_BSHD, key, value, mask, options);
  if (options.return_head_sum) {
    const Tensor index = indices_BSK.to(at::kLong);
    result.head_sum = result.head_sum.gather(2, index.clamp_min(0)).masked_fill_(index < 0, 0);
  }
  return result;
}

Tensor sparse_attention_head_sum_reference(const AttentionState& attention,
                                           const Tensor& indices_BSK) {
  const at::NoGradGuard no_grad;
  const int64_t B = indices_BSK.size(0), S = indices_BSK.size(1), L = attention.key.size(1);
  const Tensor index = indices_BSK.to(at::kLong);
  Tensor head_sum =
      at::zeros(index.sizes(), index.options().dtype(wide_type(attention.query_BSHD)));
  for (int64_t row = 0; row < B; ++row) {
    for (int64_t t = 0; t < S; t += kQueryBlock) {
      const int64_t count = std::min(kQueryBlock, S - t);
      const Tensor sums = head_sum_without_mask(attention, {row, t, count, 0, L});
      const Tensor of_block = index[row].narrow(0, t, count);
      head_sum[row]
          .narrow(0, t, count)
          .copy_(sums.gather(1, of_block.clamp_min(0)).masked_fill_(of_block < 0, 0));
    }
  }
  return head_sum;
}

}  // namespace longhaul::ops
