#include <ATen/ATen.h>

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

}  // namespace longhaul::ops
