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

// The keys that each query sees: s with first <= s <= last, int64 [B, queries]. Padding sees none:
// its first comes after its last. Without `last_BS` query t's last is t: causal attention, where
// first_BS holds the index at which t's document starts, or t + 1 for padding. With it the queries
// may be any of a sequence's, in any order.
struct KeyRange {
  KeyRange(const Tensor& doc_start_BS) : first_BS(doc_start_BS) {}  // NOLINT: implicit by design
  KeyRange(const Tensor& first, const Tensor& last) : first_BS(first), last_BS(last) {}

  Tensor last() const;  // [B, queries], given or not
  // Of the queries [first, first + count). Error where there are not so many.
  KeyRange of_queries(int64_t first, int64_t count) const;

  Tensor first_BS, last_BS;
};

// Throws Error unless the range is an int64 one of [B, queries] within `num_keys` keys; without
// `last_BS` there must be a key for each query.
void check_key_range(const KeyRange& range, at::IntArrayRef sizes_BS, int64_t num_keys,
                     const char* what);

// Whether each query sees each of num_keys keys, bool [B, queries, num_keys].
Tensor visible_mask(const KeyRange& range, int64_t num_keys);
// As many keys as queries.
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

// Throws Error with the expected and the actual dtype unless `x` has that of `like`, which
// `like_what` names; unless it holds floating-point numbers; unless it holds int32 or int64.
void check_same_dtype(const Tensor& x, const Tensor& like, const char* what, const char* like_what);
void check_is_floating(const Tensor& x, const char* what);
void check_is_integer(const Tensor& x, const char* what);

// Indices for kernels that read int32; values that it does not hold stay outside of any range.
Tensor to_int32(const Tensor& indices);

}  // namespace longhaul::ops
