// Between Ascend's layouts of sequences and ours. BSND: [B, S, heads, width]. TND: documents one
// after the other, [T, heads, width], with the end of each in `actual_seq_lengths` (cumulative);
// for BSND these are the lengths of the rows, behind which there is padding. Keys are counted from
// the beginning of the row, in TND from that of the first document. Only the operators'
// registration calls this.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

namespace longhaul::ops::library {

using at::Tensor;

class Layout {
 public:
  // Of an operator's queries, for messages under the name `op`. Throws Error for another layout.
  Layout(const char* op, std::string_view name, const Tensor& query);

  // Where the document of each row begins (see visible_mask in ops/common.h), [B, S], of rows in
  // the caller's layout. Throws Error for lengths that do not fit.
  Tensor doc_start_BS(const Tensor& rows, const std::optional<Tensor>& lengths) const;
  Tensor doc_start_BS(const Tensor& rows, const at::OptionalIntArrayRef& lengths) const;

  // An operand as [B, S, ...]; `rows` [B, S, ...] back in the caller's layout, contiguous.
  Tensor in(const Tensor& operand) const { return packed_ ? operand.unsqueeze(0) : operand; }
  Tensor out(const Tensor& rows) const { return (packed_ ? rows.squeeze(0) : rows).contiguous(); }
  // [B, S, 1, ...] (the one head of keys that all queries share) as [B, S, ...], and back.
  Tensor shared_head(const Tensor& operand, const char* what) const;
  Tensor with_head(const Tensor& rows) const { return out(rows.unsqueeze(2)); }
  // Statistics [B, S, ...] as Ascend has them: [B, 1, S, ...], or [1, T, ...]; and back, also with
  // several heads of keys: [B, N, S, G] as [B, S, N * G].
  Tensor statistics(const Tensor& rows_BS) const;
  Tensor from_statistics(const Tensor& statistics, const char* what) const;

 private:
  const char* op_;
  bool packed_;
};

// Throws Error unless a mask is the causal one, the only one there is: sparse_mode 3 without a
// sliding window.
void check_causal(const char* op, std::optional<int64_t> sparse_mode,
                  std::optional<int64_t> pre_tokens, std::optional<int64_t> next_tokens);

// The layout that two arguments name. Throws Error where they differ.
std::string_view same_layout(const char* op, std::string_view of_query, std::string_view of_key);

}  // namespace longhaul::ops::library
