// How attention, dense and sparse, is handed over for distributed tensors.
#pragma once

#include "longhaul/ops/distributed.h"
#include "longhaul/ops/flash_attention/flash_attention.h"

namespace longhaul::ops {

// query, key, value, doc_start or indices, last_key, scale, value_dim, head sum, statistics, kernel
// to out, softmax_max, softmax_sum, head_sum.
using DistributedAttention = std::tuple<Tensor, Tensor, Tensor, Tensor>(
    const Tensor&, const Tensor&, const std::optional<Tensor>&, const Tensor&,
    const std::optional<Tensor>&, double, int64_t, bool, bool, int64_t);

inline AttentionResult attention_of(const std::tuple<Tensor, Tensor, Tensor, Tensor>& results) {
  const auto& [out, max, sum, head_sum] = results;
  return {out, max, sum, head_sum};
}

}  // namespace longhaul::ops
