// What the operators of the lightning indexer and of its losses share. Only the operators'
// registration includes this.
#pragma once

#include "longhaul/ops/indexer_kl_loss/indexer_kl_loss.h"
#include "longhaul/ops/library/layout.h"
#include "longhaul/ops/library/operators.h"

namespace longhaul::ops::library {

using Strings = std::optional<std::string_view>;
using Int = std::optional<int64_t>;
using Lengths = at::OptionalIntArrayRef;
using SymLengths = at::OptionalSymIntArrayRef;
using FourTensors = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// `key_name` is what the operator's schema calls the key.
inline IndexerInputs inputs_of(const Layout& layout, const Tensor& query, const Tensor& key,
                               const Tensor& weights, const char* key_name = "key_index") {
  return {layout.in(query), layout.shared_head(key, key_name), layout.in(weights)};
}

// Of a loss: d_query_index, d_key_index, d_weights and the loss, [1].
inline FourTensors kl_results(const Layout& layout, const KlGradients& kl) {
  return {layout.out(kl.grads.query_BSHD), layout.with_head(kl.grads.key_BSD),
          layout.out(kl.grads.weights_BSH), kl.loss.reshape({1})};
}
inline FourTensors sized_kl_results(const Tensor& query_index, const Tensor& key_index,
                                    const Tensor& weights) {
  return {sized_like(query_index), sized_like(key_index), sized_like(weights),
          sized(query_index, {1}, wide_type(query_index))};
}

}  // namespace longhaul::ops::library
