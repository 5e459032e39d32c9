// A corpus in memory as rows: documents packed into rows without gaps. A row takes seq_len + 1 +
// extra ids of the stream of all documents and the next row starts seq_len later, so each token is
// predicted once in a pass. Called where a run opens its data.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>

#include "longhaul/data/corpus.h"
#include "longhaul/data/dataset.h"

namespace longhaul::data {

struct PackingOptions {
  RowShape shape;
  bool best_fit = false;  // whole documents (best_fit_dataset.h), not concatenated ones
  // true: positions restart at each document, and the last token of a document (the end-of-text
  // token) predicts nothing. A document that a row's start cuts goes on at position 0, for the row
  // cannot see further back. false: plain concatenation, positions run through the row.
  bool document_mask = true;
  // A new order of the documents for each pass, and of the rows cut from them, so that the rows of
  // a step are not neighbours. By random keys of (seed, pass, document or row).
  bool shuffle = false;
  uint64_t seed = 0;
  // true: the rows never end and run on into the next pass. false: one pass, the last row padded.
  bool repeat = true;
};

class PackedDataset : public Dataset {
 public:
  PackedDataset(TokenizedCorpus corpus, const PackingOptions& options);

  Row row(uint64_t index) const override;
  std::optional<uint64_t> num_rows() const override;
  DatasetInfo info() const override;
  DataIdentity identity() const override { return corpus_.identity; }
  uint64_t rows_in_a_pass() const override;
  RowShape shape() const override { return options_.shape; }
  std::optional<int64_t> label_bytes(const Row& row) const override;

 private:
  // The documents of one pass in their order, and where each begins in the pass.
  struct Pass {
    std::vector<uint32_t> documents;
    std::vector<uint64_t> begins;
    std::vector<uint32_t> rows;  // the order of the rows; empty without shuffling
  };
  // A stretch of the stream: ids and, for each, whether it begins a document.
  struct Stretch {
    std::vector<int32_t> ids;
    std::vector<bool> starts;
  };

  uint64_t place_of_row(uint64_t index) const;
  uint64_t document_begin(uint32_t document) const;
  std::shared_ptr<const Pass> make_pass(uint64_t number) const;
  std::shared_ptr<const Pass> pass(uint64_t number) const;
  Stretch read(uint64_t position, size_t count) const;
  void read_pass(uint64_t number, uint64_t offset, size_t count, Stretch& stretch) const;

  const TokenizedCorpus corpus_;
  const PackingOptions options_;
  int32_t max_id_ = 0;
  // Only the two passes last used: rows are read nearly in order.
  mutable std::mutex mutex_;
  mutable std::shared_ptr<const Pass> passes_[2];
  mutable uint64_t pass_numbers_[2] = {};
};

}  // namespace longhaul::data
