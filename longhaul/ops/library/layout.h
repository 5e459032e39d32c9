// Between Ascend's layouts of sequences and ours. BSND: [B, S, heads, width]. TND: documents one
// after the other, [T, heads, width], with the end of each in `actual_seq_lengths` (cumulative);
// for BSND these are the lengths of the rows, behind which there is padding. Keys are counted from
// the beginning of the row, in TND from that of the first document. Only the operators'
// registration calls this.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

#include "longhaul/ops/common.h"

namespace longhaul::ops::library {

using at::Tensor;

// Lengths in the one form as lengths in the other.
std::optional<Tensor> as_tensor(const at::OptionalIntArrayRef& lengths);

class Layout {
 public:
  // Of an operator's queries, for messages under the name `op`. Throws Error for another layout.
  Layout(const char* op, std::string_view name, const Tensor& query);

  // Where the document of each row begins (see visible_mask in ops/common.h), [B, S], of rows in
  // the caller's layout. Throws Error for lengths that do not fit.
  Tensor doc_start_BS(const Tensor& rows, const std::optional<Tensor>& lengths) const;
  Tensor doc_start_BS(const Tensor& rows, const at::OptionalIntArrayRef& lengths) const;
  // The keys that queries from position `first_query` on see, as many as there are. Throws Error
  // where that is more than there are positions.
  KeyRange keys_of_queries(const Tensor& doc_start_BS, int64_t first_query, int64_t queries) const;

  // An operand as [B, S, ...]; `rows` [B, S, ...] back in the caller's layout, contiguous.
  Tensor in(const Tensor& operand) const { return packed_ ? operand.unsqueeze(0) : operand; }
  Tensor out(const Tensor& rows) const { return (packed_ ? rows.squeeze(0) : rows).contiguous(); }
  // [B, S, 1, ...] (the one head of keys that all queries share) as [B, S, ...], and back.
  Tensor shared_head(const Tensor& operand, const char* what) const;
  Tensor with_head(const Tensor& rows) const { return out(rows.unsqueeze(2)); }
  // What each query has selected, [B, S, K] of sparse_indices [B, S, 1, K] in the caller's layout;
  // the queries are the last S of the positions of `key`. Throws Error unless each index is -1 or a
  // key that its query sees: of its own document, up to itself.
  Tensor selected_keys(const Tensor& sparse_indices, const Tensor& key,
                       const std::optional<Tensor>& lengths) const;

  // Statistics of index scores [B, S] as Ascend has them: [B, 1, S], or [1, T]. Those of an
  // attention [B, S, H] with N heads of keys: [B, N, S, G] with N * G = H, or [N, T, G]. And back.
  Tensor statistics(const Tensor& rows_BS) const;
  Tensor statistics(const Tensor& rows_BSH, int64_t key_heads) const;
  Tensor from_statistics(const Tensor& statistics, const char* what) const;

 private:
  const char* op_;
  bool packed_;
};

// Throws Error unless a mask is the causal one, the only one there is: sparse_mode 3 without a
// sliding window.
void check_causal(const char* op, std::optional<int64_t> sparse_mode,
                  std::optional<int64_t> pre_tokens, std::optional<int64_t> next_tokens);

// Queries and keys are the same positions: their lengths, of which one is enough. `names` are those
// of the arguments. Throws Error where they differ.
template <typename Lengths>
Lengths common_lengths(const char* op, const char* names, const Lengths& of_queries,
                       const Lengths& of_keys);

// The layout that two arguments name. Throws Error where they differ.
std::string_view same_layout(const char* op, std::string_view of_query, std::string_view of_key);

}  // namespace longhaul::ops::library
