// What several operators share: working dtypes and the visibility rule of packed documents.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace longhaul::ops {

using at::Tensor;

// The dtype in which statistics, softmax and losses are computed: fp64 for fp64, else fp32.
inline at::ScalarType wide_type(const Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// Key s is visible to query t if doc_start[t] <= s <= t, where doc_start_BS (int64) holds the index
// of the first position of t's document, or t + 1 for padding, which sees nothing. Returns a bool
// mask [B, S, S], true where visible.
Tensor visible_mask(const Tensor& doc_start_BS);

// Queries that the references take at a time: a block needs only the keys up to the last one that
// it sees, which halves the work on long causal sequences, and holds less memory.
inline constexpr int64_t kQueryBlock = 128;

// The number of leading keys that hold all that `mask` [B, queries, S] lets through; at least 1.
// All of them on the Meta device, where a mask has no values.
int64_t keys_up_to_last(const Tensor& mask_BQS);

// "2 x 3 x 4", for messages.
std::string shape_text(const Tensor& x);

// Throws Error naming the tensor unless `x` has `dims` dimensions; `what` names it.
void check_dims(const Tensor& x, int64_t dims, const char* what);

// A size that check_shape does not look at.
inline constexpr int64_t kAnySize = -1;

// Throws Error with the expected and the actual shape unless `x` has the sizes `expected`.
void check_shape(const Tensor& x, at::IntArrayRef expected, const char* what);

}  // namespace longhaul::ops
