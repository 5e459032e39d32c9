#include "longhaul/data/packed_dataset.h"

#include <algorithm>
#include <numeric>

#include "longhaul/base/error.h"

namespace longhaul::data {
PackedDataset::PackedDataset(TokenizedCorpus corpus, const PackingOptions& options)
    : corpus_(std::move(corpus)), options_(options) {
  const RowShape shape = options.shape;
  LONGHAUL_CHECK(shape.seq_len > 0 && shape.extra >= 0, "rows of {} + {} slots", shape.seq_len,
                 shape.extra);
  LONGHAUL_CHECK(
      !corpus_.document_ends.empty() && corpus_.document_ends.back() == corpus_.ids.size(),
      "a corpus of {} documents and {} ids", corpus_.document_ends.size(), corpus_.ids.size());
  if (corpus_.ids.size() < 2) fail_user("one token is too little to train on");
  max_id_ = *std::max_element(corpus_.ids.begin(), corpus_.ids.end());
}

uint64_t PackedDataset::rows_in_a_pass() const {
  // The first token of the stream is never predicted.
  return static_cast<uint64_t>(
      ceil_div(narrow<long>(corpus_.ids.size() - 1), narrow<long>(options_.shape.seq_len)));
}

std::optional<uint64_t> PackedDataset::num_rows() const {
  if (options_.repeat) return std::nullopt;
  return rows_in_a_pass();
}

DatasetInfo PackedDataset::info() const {
  const auto documents = static_cast<int64_t>(corpus_.document_ends.size());
  const auto tokens = static_cast<int64_t>(corpus_.ids.size());
  return {.documents = documents,
          .tokens = tokens,
          .labels = tokens - (options_.document_mask ? documents : 1),
          .text_bytes = corpus_.text_bytes,
          .rows = static_cast<int64_t>(rows_in_a_pass()),
          .max_id = max_id_};
}

std::optional<int64_t> PackedDataset::label_bytes(const Row& row) const {
  return bytes_of_labels(row, options_.shape.seq_len, corpus_.token_bytes);
}

uint64_t PackedDataset::document_begin(uint32_t document) const {
  return document == 0 ? 0 : corpus_.document_ends[document - 1];
}

std::shared_ptr<const PackedDataset::Pass> PackedDataset::make_pass(uint64_t number) const {
  auto pass = std::make_shared<Pass>();
  auto& order = pass->documents;
  if (options_.shuffle) {
    order =
        shuffled(corpus_.document_ends.size(), options_.seed, fmt::format("data.pass.{}", number));
    pass->rows = shuffled(rows_in_a_pass(), options_.seed, fmt::format("data.rows.{}", number));
  } else {
    order.resize(corpus_.document_ends.size());
    std::iota(order.begin(), order.end(), uint32_t{0});
  }
  uint64_t begin = 0;
  for (const uint32_t document : order) {
    pass->begins.push_back(begin);
    begin += corpus_.document_ends[document] - document_begin(document);
  }
  return pass;
}

std::shared_ptr<const PackedDataset::Pass> PackedDataset::pass(uint64_t number) const {
  if (!options_.shuffle) number = 0;  // all passes are alike
  const size_t place = number % 2;
  const std::lock_guard lock(mutex_);
  if (!passes_[place] || pass_numbers_[place] != number) {
    passes_[place] = make_pass(number);
    pass_numbers_[place] = number;
  }
  return passes_[place];
}

void PackedDataset::read_pass(uint64_t number, uint64_t offset, size_t count,
                              Stretch& stretch) const {
  const auto order = pass(number);
  const auto after = std::upper_bound(order->begins.begin(), order->begins.end(), offset);
  auto index = static_cast<size_t>(after - order->begins.begin()) - 1;
  uint64_t inside = offset - order->begins[index];
  for (; count > 0 && index < order->documents.size(); ++index, inside = 0) {
    const uint32_t document = order->documents[index];
    const uint64_t begin = document_begin(document);
    const uint64_t left = corpus_.document_ends[document] - begin - inside;
    const auto taken = std::min<uint64_t>(left, count);
    const int32_t* ids = corpus_.ids.data() + begin + inside;
    stretch.starts.push_back(inside == 0);
    stretch.starts.resize(stretch.starts.size() + taken - 1, false);
    stretch.ids.insert(stretch.ids.end(), ids, ids + taken);
    count -= taken;
  }
}

// Up to `count` ids from a place in the endless stream on; less at the end of a single pass.
PackedDataset::Stretch PackedDataset::read(uint64_t position, size_t count) const {
  Stretch stretch;
  const uint64_t tokens = corpus_.ids.size();
  while (stretch.ids.size() < count) {
    const uint64_t at = position + stretch.ids.size();
    if (!options_.repeat && at >= tokens) break;
    read_pass(at / tokens, at % tokens, count - stretch.ids.size(), stretch);
  }
  return stretch;
}

// Neighbouring rows come from the same document; a step of them would be one document's step.
uint64_t PackedDataset::place_of_row(uint64_t index) const {
  if (!options_.shuffle) return index;
  const uint64_t rows = rows_in_a_pass(), number = index / rows;
  return number * rows + pass(number)->rows[index % rows];
}

Row PackedDataset::row(uint64_t index) const {
  const auto rows = num_rows();
  LONGHAUL_CHECK(!rows || index < *rows, "row {} of {}", index, *rows);
  const auto slots = static_cast<size_t>(options_.shape.slots());
  const Stretch stretch =
      read(place_of_row(index) * static_cast<uint64_t>(options_.shape.seq_len), slots + 1);
  const size_t held = stretch.ids.size();
  Row row = padding_row(options_.shape);
  int32_t position = 0;
  for (size_t t = 0; t < std::min(slots, held); ++t) {
    if (options_.document_mask && stretch.starts[t]) position = 0;
    row.input_ids[t] = stretch.ids[t];
    row.position_ids[t] = position++;
    const bool predicts = t + 1 < held && !(options_.document_mask && stretch.starts[t + 1]);
    if (predicts) row.labels[t] = stretch.ids[t + 1];
  }
  return row;
}

}  // namespace longhaul::data
