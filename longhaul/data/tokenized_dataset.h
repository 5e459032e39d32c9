// The dataset "tokenized": rows that are already ids, from JSONL. Each line is an object with
// "input_ids" (exactly seq_len ids) and, if wanted, "labels" and "position_ids" of the same length.
// Needs no tokenizer. Called where a run opens its data.
#pragma once

#include "longhaul/data/dataset.h"
#include "longhaul/data/file_list.h"

namespace longhaul::data {

struct TokenizedOptions {
  // The extra slots are padding: what lies behind a row's end is not known.
  RowShape shape;
  std::optional<int32_t> vocab_size;  // ids are checked against it
  bool repeat = true;                 // true: the rows never end; false: one pass
};

class TokenizedDataset : public Dataset {
 public:
  // Reads and checks all rows, in file order; blank lines are skipped. UserError with file and line
  // for anything that is not as described in the .cpp, and for files without a row.
  TokenizedDataset(const std::vector<CorpusFile>& files, const TokenizedOptions& options);

  Row row(uint64_t index) const override;
  std::optional<uint64_t> num_rows() const override;
  DatasetInfo info() const override;
  RowShape shape() const override { return options_.shape; }
  std::optional<int64_t> label_bytes(const Row&) const override { return std::nullopt; }

 private:
  void add(const Row& row);

  const TokenizedOptions options_;
  uint64_t num_rows_ = 0;
  DatasetInfo info_;
  std::vector<int32_t> input_ids_, labels_, position_ids_;  // seq_len for each row
};

}  // namespace longhaul::data
