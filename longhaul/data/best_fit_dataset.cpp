#include "longhaul/data/best_fit_dataset.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "longhaul/base/error.h"

namespace longhaul::data {

BestFitDataset::BestFitDataset(TokenizedCorpus corpus, const PackingOptions& options)
    : corpus_(std::move(corpus)), options_(options) {
  LONGHAUL_CHECK(options.shape.seq_len > 0 && options.shape.extra >= 0, "rows of {} + {} slots",
                 options.shape.seq_len, options.shape.extra);
  LONGHAUL_CHECK(options.document_mask, "whole documents that see one another");
  if (corpus_.ids.size() < 2) fail_user("one token is too little to train on");
  place(cut_documents());
  const auto documents = static_cast<int64_t>(corpus_.document_ends.size());
  const auto tokens = static_cast<int64_t>(corpus_.ids.size());
  info_ = {.documents = documents,
           .tokens = tokens,
           .labels = tokens - documents,
           .text_bytes = corpus_.text_bytes,
           .rows = static_cast<int64_t>(rows_.size()),
           .max_id = *std::max_element(corpus_.ids.begin(), corpus_.ids.end())};
}

std::vector<BestFitDataset::Piece> BestFitDataset::cut_documents() const {
  const auto seq_len = static_cast<uint64_t>(options_.shape.seq_len);
  std::vector<Piece> pieces;
  uint64_t begin = 0;
  for (const uint64_t end : corpus_.document_ends) {
    for (; begin < end; begin += pieces.back().length) {
      pieces.push_back({begin, std::min(seq_len, end - begin), end});
    }
  }
  return pieces;
}

// Best fit decreasing: the longest piece first, each into the row with the least room that takes
// it.
void BestFitDataset::place(std::vector<Piece> pieces) {
  std::stable_sort(pieces.begin(), pieces.end(),
                   [](const Piece& a, const Piece& b) { return a.length > b.length; });
  std::multimap<uint64_t, size_t> rows_by_room;
  for (const Piece& piece : pieces) {
    auto row = rows_by_room.lower_bound(piece.length);
    uint64_t room = static_cast<uint64_t>(options_.shape.seq_len);
    size_t index = rows_.size();
    if (row == rows_by_room.end()) {
      rows_.emplace_back();
    } else {
      std::tie(room, index) = *row;
      rows_by_room.erase(row);
    }
    rows_[index].push_back(piece);
    if (room > piece.length) rows_by_room.emplace(room - piece.length, index);
  }
}

std::optional<uint64_t> BestFitDataset::num_rows() const {
  if (options_.repeat) return std::nullopt;
  return rows_.size();
}

DatasetInfo BestFitDataset::info() const { return info_; }

std::optional<int64_t> BestFitDataset::label_bytes(const Row& row) const {
  return bytes_of_labels(row, options_.shape.seq_len, corpus_.token_bytes);
}

std::shared_ptr<const std::vector<uint32_t>> BestFitDataset::order(uint64_t pass) const {
  const std::lock_guard lock(mutex_);
  if (!order_ || order_pass_ != pass) {
    order_ = std::make_shared<const std::vector<uint32_t>>(
        shuffled(rows_.size(), options_.seed, fmt::format("data.rows.{}", pass)));
    order_pass_ = pass;
  }
  return order_;
}

// A piece that its document goes on behind fills the row: the extra slots hold what follows.
void BestFitDataset::copy(const Piece& piece, size_t slot, Row& row) const {
  const bool goes_on = piece.begin + piece.length < piece.document_end;
  const uint64_t slots = row.input_ids.size();
  const uint64_t end =
      goes_on ? std::min(piece.begin + slots, piece.document_end) : piece.begin + piece.length;
  int32_t position = 0;
  for (uint64_t at = piece.begin; at < end; ++at, ++slot) {
    row.input_ids[slot] = corpus_.ids[at];
    row.position_ids[slot] = position++;
    if (at + 1 < piece.document_end) row.labels[slot] = corpus_.ids[at + 1];
  }
}

Row BestFitDataset::row(uint64_t index) const {
  LONGHAUL_CHECK(options_.repeat || index < rows_.size(), "row {} of {}", index, rows_.size());
  const uint64_t pass = index / rows_.size();
  uint64_t place = index % rows_.size();
  if (options_.shuffle) place = (*order(pass))[place];
  Row row = padding_row(options_.shape);
  size_t slot = 0;
  for (const Piece& piece : rows_[place]) {
    copy(piece, slot, row);
    slot += piece.length;
  }
  return row;
}

std::unique_ptr<Dataset> pack(TokenizedCorpus corpus, const PackingOptions& options) {
  if (options.best_fit) return std::make_unique<BestFitDataset>(std::move(corpus), options);
  return std::make_unique<PackedDataset>(std::move(corpus), options);
}

}  // namespace longhaul::data
