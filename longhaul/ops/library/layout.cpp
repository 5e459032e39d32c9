#include "longhaul/ops/library/layout.h"

#include <ATen/ATen.h>

#include "longhaul/base/error.h"
#include "longhaul/ops/common.h"

namespace longhaul::ops::library {
namespace {

// Of documents that end at `ends` (ascending, the last one at T).
Tensor starts_of_documents(const char* op, const Tensor& ends, int64_t T) {
  const Tensor host = ends.to(at::kCPU, at::kLong).contiguous();
  Tensor starts = at::empty({1, T}, at::kLong);
  const auto* end = host.const_data_ptr<int64_t>();
  auto* start = starts.mutable_data_ptr<int64_t>();
  int64_t begin = 0;
  for (int64_t i = 0; i < host.numel(); ++i) {
    LONGHAUL_CHECK(end[i] >= begin && end[i] <= T,
                   "{}: actual_seq_lengths[{}] is {}, expected {} to {} (ends of documents)", op, i,
                   end[i], begin, T);
    std::fill(start + begin, start + end[i], begin);
    begin = end[i];
  }
  LONGHAUL_CHECK(begin == T, "{}: the documents of actual_seq_lengths end at {}, expected {}", op,
                 begin, T);
  return starts;
}

// Of rows of the given lengths; padding sees nothing.
Tensor starts_of_rows(const Tensor& lengths, int64_t B, int64_t S) {
  const Tensor position = at::arange(S, at::kLong).unsqueeze(0);
  const Tensor valid = position < lengths.to(at::kCPU, at::kLong).view({B, 1});
  return at::where(valid, at::zeros({1, 1}, at::kLong), position + 1);
}

Tensor starts(const char* op, bool packed, const Tensor& query,
              const std::optional<Tensor>& lengths) {
  if (packed) {
    LONGHAUL_CHECK(lengths.has_value() && lengths->dim() == 1,
                   "{}: TND needs actual_seq_lengths, the ends of the documents", op);
    return starts_of_documents(op, *lengths, query.size(0));
  }
  const int64_t B = query.size(0), S = query.size(1);
  if (!lengths) return at::zeros({B, S}, at::kLong);
  LONGHAUL_CHECK(lengths->dim() == 1 && lengths->size(0) == B,
                 "{}: actual_seq_lengths [{}]: expected {} lengths", op, shape_text(*lengths), B);
  return starts_of_rows(*lengths, B, S);
}

}  // namespace

Layout::Layout(const char* op, std::string_view name, const Tensor& query,
               const std::optional<Tensor>& lengths)
    : op_(op), packed_(name == "TND") {
  LONGHAUL_CHECK(packed_ || name == "BSND", "{}: layout '{}' is none of 'BSND' and 'TND'", op,
                 name);
  check_dims(query, packed_ ? 3 : 4, packed_ ? "query of layout TND" : "query of layout BSND");
  doc_start_BS_ = starts(op, packed_, query, lengths).to(query.device());
}

Tensor Layout::shared_head(const Tensor& operand, const char* what) const {
  const Tensor rows = in(operand);
  LONGHAUL_CHECK(rows.dim() == 4 && rows.size(2) == 1,
                 "{}: {} [{}]: expected one head, which all queries share", op_, what,
                 shape_text(operand));
  return rows.squeeze(2);
}

Tensor Layout::statistics(const Tensor& rows_BSH) const {
  return packed_ ? rows_BSH : rows_BSH.unsqueeze(1);
}

}  // namespace longhaul::ops::library
