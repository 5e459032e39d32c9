// An attention's operands as the library's operators get them from their callers. Only the
// operators' registration includes this.
#pragma once

#include <functional>

#include "longhaul/ops/flash_attention/flash_attention.h"
#include "longhaul/ops/library/layout.h"
#include "longhaul/ops/library/operators.h"

namespace longhaul::ops::library {

// In the caller's layout; a rope part is joined to the columns it was cut from.
struct AttentionArguments {
  const char* op;  // for messages
  const Tensor &query, &key;
  const MaybeTensor &value, &query_rope, &key_rope;
};

// [B, S, heads, width] each, an absent value undefined. Throws Error for a rope part that does not
// fit.
struct AttentionOperands {
  Tensor query_BSHD, key, value;
};
AttentionOperands attention_operands(const Layout& layout, const AttentionArguments& arguments);

// The same as dense attention takes them: one head of keys, which all of the query's share, as
// [B, S, D].
AttentionOperands dense_attention_operands(const Layout& layout,
                                           const AttentionArguments& arguments);

// With what the attention has saved.
AttentionState attention_state(const Layout& layout, const AttentionOperands& operands,
                               const Tensor& softmax_max, const Tensor& softmax_sum,
                               double scale_value);

// By automatic differentiation of attend(query, key, value).
AttentionGradients reference_attention_gradients(
    const AttentionState& attention, const Tensor& d_out,
    const std::function<Tensor(const Tensor&, const Tensor&, const Tensor&)>& attend);

// d_query, d_key, d_value, d_query_rope and d_key_rope, in the caller's layout; empty where the
// argument is absent.
using AttentionResults = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
AttentionResults attention_results(const Layout& layout, const AttentionArguments& arguments,
                                   const AttentionGradients& gradients);
AttentionResults sized_like_attention(const AttentionArguments& arguments);

// A statistic that nobody asked for.
inline Tensor no_statistics(const Tensor& query) {
  return at::empty({0}, query.options().dtype(wide_type(query)));
}

// Of the results on the Meta device: out, softmax_max and softmax_sum.
ThreeTensors sized_attention(const AttentionArguments& arguments, bool return_softmax_lse);

}  // namespace longhaul::ops::library
