// Between Ascend's layouts of sequences and ours. BSND: [B, S, heads, width]. TND: documents one
// after the other, [T, heads, width], with the end of each in `actual_seq_lengths` (cumulative);
// for BSND these are the lengths of the rows, behind which there is padding. Only the operators'
// registration calls this.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

namespace longhaul::ops::library {

using at::Tensor;

class Layout {
 public:
  // Of an operator's queries, for messages under the name `op`. Throws Error for another layout
  // and for lengths that do not fit.
  Layout(const char* op, std::string_view name, const Tensor& query,
         const std::optional<Tensor>& lengths);

  // Where each query's document begins (see visible_mask in ops/common.h), [B, S].
  const Tensor& doc_start_BS() const { return doc_start_BS_; }

  // An operand as [B, S, ...]; `rows` [B, S, ...] back in the caller's layout.
  Tensor in(const Tensor& operand) const { return packed_ ? operand.unsqueeze(0) : operand; }
  Tensor out(const Tensor& rows) const { return packed_ ? rows.squeeze(0) : rows; }
  // [B, S, 1, ...] (the one head of keys that all queries share) as [B, S, ...].
  Tensor shared_head(const Tensor& operand, const char* what) const;
  // Statistics [B, S, H] as Ascend has them: [B, 1, S, H], or [1, T, H].
  Tensor statistics(const Tensor& rows_BSH) const;

 private:
  const char* op_;
  bool packed_;
  Tensor doc_start_BS_;
};

}  // namespace longhaul::ops::library
