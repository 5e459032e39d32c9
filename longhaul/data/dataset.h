// Rows of tokens by number: what training and validation read. A row's content depends on its
// number only, so one number (the rows consumed so far) is the whole position of a run, whatever
// the number of ranks was or will be. Implementations: packed_dataset.h, tokenized_dataset.h.
// Called by train/.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace longhaul::data {

constexpr int32_t kIgnoredLabel = -100;   // this slot predicts nothing
constexpr int32_t kPaddingPosition = -1;  // this slot holds no token

// seq_len + extra slots. The trunk of the model uses the first seq_len of them; the extra ones, one
// for each MTP module, are what these modules look at beyond the end.
struct Row {
  std::vector<int32_t> input_ids;
  std::vector<int32_t> labels;        // the token after each slot, or kIgnoredLabel
  std::vector<int32_t> position_ids;  // 0 starts a document; kPaddingPosition
};

struct RowShape {
  int64_t seq_len = 0;
  int64_t extra = 0;
  int64_t slots() const { return seq_len + extra; }
};

// What one pass over the data holds, for the log.
struct DatasetInfo {
  int64_t documents = 0;
  int64_t tokens = 0;
  int64_t labels = 0;      // tokens that are predicted, in one pass
  int64_t text_bytes = 0;  // 0: not known
  int64_t rows = 0;        // of one pass; the last one may be padded or run on into the next pass
  int32_t max_id = 0;      // to hold against the model's vocabulary
};

class Dataset {
 public:
  virtual ~Dataset() = default;

  // The row of that number, counted over all ranks and passes. Threads may call it at once.
  // Error when num_rows() says that there is none.
  virtual Row row(uint64_t index) const = 0;
  // nullopt: the rows never end.
  virtual std::optional<uint64_t> num_rows() const = 0;
  virtual DatasetInfo info() const = 0;
  virtual RowShape shape() const = 0;
  // Bytes of UTF-8 text that the labels of the row's first seq_len slots stand for, special tokens
  // counting nothing: the divisor of bits per byte. nullopt where the text is not known.
  virtual std::optional<int64_t> label_bytes(const Row& row) const = 0;
};

// A row without tokens, for ranks that have none left in the last step of a pass.
Row padding_row(const RowShape& shape);

// dataset.row(index), or a padding row behind the end.
Row row_or_padding(const Dataset& dataset, uint64_t index);

struct RowRange {
  uint64_t first;
  uint64_t count;
};

// The rows that data rank `rank` of `num_ranks` takes in the step that starts after `position`
// rows: of the next global_batch_size rows the rank-th equal part. Error when they do not divide.
struct StepRows {
  uint64_t position = 0;
  uint64_t global_batch_size = 0;
  uint64_t rank = 0;
  uint64_t num_ranks = 1;
};
RowRange rows_of_rank(const StepRows& step);

// values[t + shift] at each t, or `fill` where that slot is behind the end, padding or part of
// another document: what the shift-th MTP module reads. Spans of equal length.
std::vector<int32_t> shift_within_documents(std::span<const int32_t> values,
                                            std::span<const int32_t> position_ids, int64_t shift,
                                            int32_t fill);

}  // namespace longhaul::data
