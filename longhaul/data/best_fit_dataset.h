// A corpus in memory as rows: whole documents, each row filled by those that fit it best, its rest
// padding. A document longer than seq_len is cut into pieces of that length; a piece that is not
// its last fills a row alone and predicts on into the next. Positions restart at each document and
// piece. Ding et al., "Fewer Truncations Improve Language Modeling", 2024. Called where a run opens
// its data.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>

#include "longhaul/data/packed_dataset.h"

namespace longhaul::data {

class BestFitDataset : public Dataset {
 public:
  // options.document_mask must be true. UserError for a corpus of one token.
  BestFitDataset(TokenizedCorpus corpus, const PackingOptions& options);

  Row row(uint64_t index) const override;
  std::optional<uint64_t> num_rows() const override;
  DatasetInfo info() const override;
  DataIdentity identity() const override { return corpus_.identity; }
  RowShape shape() const override { return options_.shape; }
  std::optional<int64_t> label_bytes(const Row& row) const override;

 private:
  // Ids [begin, begin + length) of the corpus, of a document that ends at `document_end`.
  struct Piece {
    uint64_t begin, length, document_end;
  };

  std::vector<Piece> cut_documents() const;
  void place(std::vector<Piece> pieces);
  void copy(const Piece& piece, size_t slot, Row& row) const;
  std::shared_ptr<const std::vector<uint32_t>> order(uint64_t pass) const;

  const TokenizedCorpus corpus_;
  const PackingOptions options_;
  std::vector<std::vector<Piece>> rows_;
  DatasetInfo info_;
  mutable std::mutex mutex_;
  mutable std::shared_ptr<const std::vector<uint32_t>> order_;  // of the pass last used
  mutable uint64_t order_pass_ = 0;
};

// The dataset that options.best_fit asks for.
std::unique_ptr<Dataset> pack(TokenizedCorpus corpus, const PackingOptions& options);

}  // namespace longhaul::data
