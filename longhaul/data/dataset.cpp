#include "longhaul/data/dataset.h"

#include "longhaul/base/error.h"

namespace longhaul::data {

Row padding_row(const RowShape& shape) {
  const auto slots = static_cast<size_t>(shape.slots());
  return {.input_ids = std::vector<int32_t>(slots, 0),
          .labels = std::vector<int32_t>(slots, kIgnoredLabel),
          .position_ids = std::vector<int32_t>(slots, kPaddingPosition)};
}

Row row_or_padding(const Dataset& dataset, uint64_t index) {
  const auto rows = dataset.num_rows();
  return rows && index >= *rows ? padding_row(dataset.shape()) : dataset.row(index);
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
