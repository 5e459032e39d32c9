// Rows of tokens by number: what training and validation read. A row's content depends on its
// number only, so one number (the rows consumed so far) is the whole position of a run, whatever
// the number of ranks was or will be. Implementations: packed_dataset.h, best_fit_dataset.h,
// stream_dataset.h, mixed_dataset.h, tokenized_dataset.h. Called by train/.
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

// What one pass over the data holds, for the log. Of a stream nothing is known beforehand: all 0.
struct DatasetInfo {
  int64_t documents = 0;
  int64_t tokens = 0;
  int64_t labels = 0;      // tokens that are predicted, in one pass
  int64_t text_bytes = 0;  // 0: not known
  int64_t rows = 0;        // of one pass; the last one may be padded or run on into the next pass
  int32_t max_id = 0;      // to hold against the model's vocabulary
};

// What rows are made of, to tell whether a run goes on with the data that it had.
struct DataIdentity {
  uint64_t tokenizer = 0;  // the fingerprint of the one that the ids are of; 0: not known
  std::string files;       // Sources::fingerprint(); empty: not known
};

class Dataset {
 public:
  virtual ~Dataset() = default;

  // The row of that number, counted over all ranks and passes. Threads may call it at once.
  // Error when there is none.
  virtual Row row(uint64_t index) const = 0;
  // Whether there is a row of that number. Then there are all before it.
  virtual bool has_row(uint64_t index) const {
    const auto rows = num_rows();
    return !rows || index < *rows;
  }
  // nullopt: the rows never end, or, of a stream, their end was not reached yet. Once has_row() was
  // false it is known.
  virtual std::optional<uint64_t> num_rows() const = 0;
  // Rows of one pass. A stream reads on to the pass's end for it, if it has not been there.
  virtual uint64_t rows_in_a_pass() const { return static_cast<uint64_t>(info().rows); }
  virtual DatasetInfo info() const = 0;
  virtual DataIdentity identity() const { return {}; }
  // That a stream has left out so far, in each pass anew. What is read when data are opened is told
  // there.
  virtual int64_t bad_documents() const { return 0; }
  virtual RowShape shape() const = 0;
  // Bytes of UTF-8 text that the labels of the row's first seq_len slots stand for, special tokens
  // counting nothing: the divisor of bits per byte. nullopt where the text is not known.
  virtual std::optional<int64_t> label_bytes(const Row& row) const = 0;
};

// Bytes of text of the labels of the first seq_len slots; nullopt if `token_bytes` is empty.
std::optional<int64_t> bytes_of_labels(const Row& row, int64_t seq_len,
                                       std::span<const uint32_t> token_bytes);

// 0 .. count-1 in an order that (seed, name) alone decides.
std::vector<uint32_t> shuffled(size_t count, uint64_t seed, const std::string& name);

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
