#include "longhaul/ops/library/layout.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>

#include "longhaul/base/error.h"
#include "longhaul/ops/common.h"
#include "longhaul/ops/library/operators.h"

namespace longhaul::ops::library {
namespace {

Tensor on_host(const Tensor& lengths) {
  return to_int64(lengths, "actual_seq_lengths").cpu().contiguous();
}

// Of documents that end at `ends` (ascending, the last one at T).
Tensor starts_of_documents(const char* op, const Tensor& ends, int64_t T) {
  const Tensor host = on_host(ends);
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
Tensor starts_of_rows(const char* op, const Tensor& lengths, int64_t B, int64_t S) {
  const Tensor host = on_host(lengths);
  const auto* length = host.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < B; ++i) {
    LONGHAUL_CHECK(0 <= length[i] && length[i] <= S,
                   "{}: actual_seq_lengths[{}] is {}, expected 0 to {} (lengths of rows)", op, i,
                   length[i], S);
  }
  const Tensor position = at::arange(S, at::kLong).unsqueeze(0);
  const Tensor valid = position < host.view({B, 1});
  return at::where(valid, at::zeros({1, 1}, at::kLong), position + 1);
}

std::vector<int64_t> values_of(at::IntArrayRef lengths) { return lengths.vec(); }
std::vector<int64_t> values_of(const Tensor& lengths) {
  const Tensor host = on_host(lengths);
  const auto* first = host.const_data_ptr<int64_t>();
  return {first, first + host.numel()};
}

// "[5, 33]", the first of many.
std::string text_of(const std::vector<int64_t>& lengths) {
  constexpr size_t kMost = 8;
  const auto end = lengths.begin() + static_cast<int64_t>(std::min(lengths.size(), kMost));
  return fmt::format("[{}{}]", fmt::join(lengths.begin(), end, ", "),
                     lengths.size() > kMost ? fmt::format(", ... ({})", lengths.size()) : "");
}

// Keys [low, high] that a query sees, and what it has selected of them.
struct QuerySelection {
  int64_t low, high;
  const int32_t* keys;
  int64_t count;

  bool fits() const {
    bool wrong = false;  // without a branch, so that it is vectorised
    for (int64_t i = 0; i < count; ++i) {
      wrong |= keys[i] != -1 && (keys[i] < low || keys[i] > high);
    }
    return !wrong;
  }
  int32_t first_wrong() const {
    return *std::find_if(keys, keys + count,
                         [&](int64_t key) { return key != -1 && (key < low || key > high); });
  }
};

}  // namespace

std::optional<Tensor> as_tensor(const at::OptionalIntArrayRef& lengths) {
  return lengths ? std::optional(at::tensor(*lengths, at::kLong)) : std::nullopt;
}

Layout::Layout(const char* op, std::string_view name, const Tensor& query)
    : op_(op), packed_(name == "TND") {
  LONGHAUL_CHECK(packed_ || name == "BSND", "{}: layout: expected 'BSND' or 'TND', got '{}'", op,
                 name);
  LONGHAUL_CHECK(query.dim() == (packed_ ? 3 : 4),
                 "{}: query: expected {} dimensions ({}), got [{}]", op, packed_ ? 3 : 4, name,
                 shape_text(query));
}

Tensor Layout::doc_start_BS(const Tensor& rows, const std::optional<Tensor>& lengths) const {
  if (packed_) {
    LONGHAUL_CHECK(lengths.has_value() && lengths->dim() == 1,
                   "{}: actual_seq_lengths: expected the ends of the documents, [documents], for "
                   "TND, got {}",
                   op_, lengths ? "[" + shape_text(*lengths) + "]" : "None");
    return starts_of_documents(op_, *lengths, rows.size(0)).to(rows.device());
  }
  const int64_t B = rows.size(0), S = rows.size(1);
  if (!lengths) return at::zeros({B, S}, rows.options().dtype(at::kLong));
  LONGHAUL_CHECK(lengths->dim() == 1 && lengths->size(0) == B,
                 "{}: actual_seq_lengths [{}]: expected {} lengths", op_, shape_text(*lengths), B);
  return starts_of_rows(op_, *lengths, B, S).to(rows.device());
}

Tensor Layout::doc_start_BS(const Tensor& rows, const at::OptionalIntArrayRef& lengths) const {
  return doc_start_BS(rows, as_tensor(lengths));
}

KeyRange Layout::keys_of_queries(const Tensor& doc_start_BS, int64_t first_query,
                                 int64_t queries) const {
  const int64_t positions = doc_start_BS.size(1);
  LONGHAUL_CHECK(queries <= positions, "{}: query: expected at most {} positions, the keys, got {}",
                 op_, positions, queries);
  LONGHAUL_CHECK(first_query >= 0 && first_query <= positions - queries,
                 "{}: first_query: expected 0 to {} ({} of {} positions), got {}", op_,
                 positions - queries, queries, positions, first_query);
  return KeyRange(doc_start_BS).of_queries(first_query, queries);
}

Tensor Layout::shared_head(const Tensor& operand, const char* what) const {
  const Tensor rows = in(operand);
  LONGHAUL_CHECK(rows.dim() == 4 && rows.size(2) == 1,
                 "{}: {} [{}]: expected one head, which all queries share", op_, what,
                 shape_text(operand));
  return rows.squeeze(2);
}

Tensor Layout::selected_keys(const Tensor& sparse_indices, const Tensor& key,
                             const std::optional<Tensor>& lengths) const {
  const Tensor rows = shared_head(sparse_indices, "sparse_indices");
  check_is_integer(sparse_indices, "sparse_indices");
  const Tensor indices = to_int32(rows);
  const Tensor doc_start = doc_start_BS(key, lengths).contiguous();
  const int64_t B = indices.size(0), S = indices.size(1), K = indices.size(2);
  const int64_t L = doc_start.size(1);
  LONGHAUL_CHECK(doc_start.size(0) == B && S <= L,
                 "{}: sparse_indices [{}] for key [{}]: expected at most one query for each key",
                 op_, shape_text(sparse_indices), shape_text(key));
  const auto selection = [&](int64_t row) -> QuerySelection {
    const int64_t position = row % S + L - S;
    return {doc_start.const_data_ptr<int64_t>()[row / S * L + position], position,
            indices.const_data_ptr<int32_t>() + row * K, K};
  };
  std::atomic<int64_t> wrong = B * S;  // the first row
  at::parallel_for(0, B * S, 64, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      if (selection(row).fits()) continue;
      int64_t first = wrong;
      while (row < first && !wrong.compare_exchange_weak(first, row)) {
      }
      return;
    }
  });
  if (wrong < B * S) {
    const QuerySelection found = selection(wrong);
    LONGHAUL_CHECK(
        false,
        "{}: sparse_indices of query {} of row {} hold {}, expected -1 or keys of its "
        "document up to itself: {}; documents end where actual_seq_lengths say",
        op_, wrong % S, wrong / S, found.first_wrong(),
        found.low > found.high ? "it sees none" : fmt::format("{} to {}", found.low, found.high));
  }
  return indices;
}

Tensor Layout::statistics(const Tensor& rows_BS) const {
  return packed_ ? rows_BS : rows_BS.unsqueeze(1);
}

Tensor Layout::statistics(const Tensor& rows_BSH, int64_t key_heads) const {
  return out(rows_BSH.unflatten(2, {key_heads, -1}).transpose(1, 2));
}

Tensor Layout::from_statistics(const Tensor& statistics, const char* what) const {
  const Tensor rows = in(statistics);
  LONGHAUL_CHECK(rows.dim() == 3 || rows.dim() == 4, "{}: {} [{}]: expected {} or {} dimensions",
                 op_, what, shape_text(statistics), packed_ ? 2 : 3, packed_ ? 3 : 4);
  return rows.dim() == 4 ? rows.transpose(1, 2).flatten(2) : rows.squeeze(1);
}

void check_causal(const char* op, std::optional<int64_t> sparse_mode,
                  std::optional<int64_t> pre_tokens, std::optional<int64_t> next_tokens) {
  constexpr int64_t kCausal = 3, kAll = std::numeric_limits<int64_t>::max();
  LONGHAUL_CHECK(sparse_mode.value_or(kCausal) == kCausal,
                 "{}: sparse_mode: expected 3 (causal), got {}", op, *sparse_mode);
  LONGHAUL_CHECK(pre_tokens.value_or(kAll) == kAll && next_tokens.value_or(kAll) == kAll,
                 "{}: pre_tokens and next_tokens: expected {} for both (no sliding window), got {} "
                 "and {}",
                 op, kAll, pre_tokens.value_or(kAll), next_tokens.value_or(kAll));
}

template <typename Lengths>
Lengths common_lengths(const char* op, const char* names, const Lengths& of_queries,
                       const Lengths& of_keys) {
  if (!of_queries || !of_keys) return of_queries ? of_queries : of_keys;
  const auto a = values_of(*of_queries), b = values_of(*of_keys);
  LONGHAUL_CHECK(a == b, "{}: {}: expected the same lengths, got {} and {}", op, names, text_of(a),
                 text_of(b));
  return of_queries;
}
template std::optional<Tensor> common_lengths(const char*, const char*,
                                              const std::optional<Tensor>&,
                                              const std::optional<Tensor>&);
template at::OptionalIntArrayRef common_lengths(const char*, const char*,
                                                const at::OptionalIntArrayRef&,
                                                const at::OptionalIntArrayRef&);

std::string_view same_layout(const char* op, std::string_view of_query, std::string_view of_key) {
  LONGHAUL_CHECK(of_query == of_key,
                 "{}: layouts of query and key: expected the same, got '{}' and '{}'", op, of_query,
                 of_key);
  return of_query;
}

}  // namespace longhaul::ops::library
