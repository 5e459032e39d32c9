#include "longhaul/data/dataset.h"

#include <algorithm>
#include <numeric>

#include "longhaul/base/error.h"
#include "longhaul/base/rng.h"

namespace longhaul::data {

std::optional<int64_t> bytes_of_labels(const Row& row, int64_t seq_len,
                                       std::span<const uint32_t> token_bytes) {
  if (token_bytes.empty()) return std::nullopt;
  int64_t bytes = 0;
  for (size_t t = 0; t < static_cast<size_t>(seq_len); ++t) {
    if (row.labels[t] == kIgnoredLabel) continue;
    const auto id = static_cast<size_t>(row.labels[t]);
    LONGHAUL_CHECK(id < token_bytes.size(), "label {} of {} tokens", id, token_bytes.size());
    bytes += token_bytes[id];
  }
  return bytes;
}

std::vector<uint32_t> shuffled(size_t count, uint64_t seed, const std::string& name) {
  const CounterRng rng(seed, name);
  std::vector<uint64_t> keys(count);
  for (size_t i = 0; i < count; ++i) keys[i] = rng.bits(i);
  std::vector<uint32_t> order(count);
  std::iota(order.begin(), order.end(), uint32_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](uint32_t a, uint32_t b) { return keys[a] < keys[b]; });
  return order;
}

Row padding_row(const RowShape& shape) {
  const auto slots = static_cast<size_t>(shape.slots());
  return {.input_ids = std::vector<int32_t>(slots, 0),
          .labels = std::vector<int32_t>(slots, kIgnoredLabel),
          .position_ids = std::vector<int32_t>(slots, kPaddingPosition)};
}

Row row_or_padding(const Dataset& dataset, uint64_t index) {
  return dataset.has_row(index) ? dataset.row(index) : padding_row(dataset.shape());
}

RowRange rows_of_rank(const StepRows& step) {
  LONGHAUL_CHECK(step.rank < step.num_ranks, "data rank {} of {}", step.rank, step.num_ranks);
  const auto count = static_cast<uint64_t>(div_exact(
      narrow<long>(step.global_batch_size), narrow<long>(step.num_ranks), "global_batch_size"));
  return {step.position + step.rank * count, count};
}

std::vector<int32_t> shift_within_documents(std::span<const int32_t> values,
                                            std::span<const int32_t> position_ids, int64_t shift,
                                            int32_t fill) {
  LONGHAUL_CHECK(values.size() == position_ids.size() && shift >= 0,
                 "{} values, {} positions, by {}", values.size(), position_ids.size(), shift);
  const auto by = static_cast<size_t>(shift);
  std::vector<int32_t> shifted(values.size(), fill);
  for (size_t t = 0; t + by < values.size(); ++t) {
    // Positions rise by one inside a document and fall at its end, so that only slots of one
    // document are as far apart in position as in the row.
    const bool same = position_ids[t] != kPaddingPosition &&
                      position_ids[t + by] == position_ids[t] + static_cast<int32_t>(shift);
    if (same) shifted[t] = values[t + by];
  }
  return shifted;
}

}  // namespace longhaul::data
