#include "longhaul/data/packed_dataset.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>

#include "longhaul/base/error.h"
#include "tests/data/temporary_folder.h"

namespace longhaul::data {
namespace {

using testing::ElementsAre;

constexpr int32_t kI = kIgnoredLabel, kP = kPaddingPosition;

TokenizedCorpus corpus_of(const std::vector<std::vector<int32_t>>& documents) {
  TokenizedCorpus corpus;
  for (const auto& document : documents) {
    corpus.ids.insert(corpus.ids.end(), document.begin(), document.end());
    corpus.document_ends.push_back(corpus.ids.size());
  }
  return corpus;
}

// Documents of 3, 1 and 4 ids; 9 ends each.
TokenizedCorpus three_documents() { return corpus_of({{1, 2, 9}, {9}, {3, 4, 5, 9}}); }

TEST(PackedDataset, RowsWithDocumentMask) {
  const PackedDataset data(three_documents(), {.shape = {.seq_len = 5}});
  const Row first = data.row(0), second = data.row(1);
  EXPECT_THAT(first.input_ids, ElementsAre(1, 2, 9, 9, 3));
  EXPECT_THAT(first.labels, ElementsAre(2, 9, kI, kI, 4));
  EXPECT_THAT(first.position_ids, ElementsAre(0, 1, 2, 0, 0));
  // Cut inside the third document, then on into the next pass.
  EXPECT_THAT(second.input_ids, ElementsAre(4, 5, 9, 1, 2));
  EXPECT_THAT(second.labels, ElementsAre(5, 9, kI, 2, 9));
  EXPECT_THAT(second.position_ids, ElementsAre(0, 1, 2, 0, 1));
}

TEST(PackedDataset, RowsOfPlainConcatenation) {
  const PackedDataset data(three_documents(), {.shape = {.seq_len = 5}, .document_mask = false});
  const Row first = data.row(0);
  EXPECT_THAT(first.labels, ElementsAre(2, 9, 9, 3, 4));
  EXPECT_THAT(first.position_ids, ElementsAre(0, 1, 2, 3, 4));
}

TEST(PackedDataset, ExtraSlotsLookIntoTheNextRow) {
  const PackedDataset data(three_documents(), {.shape = {.seq_len = 3, .extra = 2}});
  const Row first = data.row(0), second = data.row(1);
  EXPECT_THAT(first.input_ids, ElementsAre(1, 2, 9, 9, 3));
  EXPECT_THAT(first.labels, ElementsAre(2, 9, kI, kI, 4));
  EXPECT_THAT(second.input_ids, ElementsAre(9, 3, 4, 5, 9));
  EXPECT_THAT(second.position_ids, ElementsAre(0, 0, 1, 2, 3));
}

TEST(PackedDataset, OnePassPadsTheLastRow) {
  const PackedDataset data(three_documents(),
                           {.shape = {.seq_len = 5, .extra = 1}, .repeat = false});
  EXPECT_EQ(data.num_rows(), 2u);
  EXPECT_EQ(data.info().rows, 2);
  const Row last = data.row(1);
  EXPECT_THAT(last.input_ids, ElementsAre(4, 5, 9, 0, 0, 0));
  EXPECT_THAT(last.labels, ElementsAre(5, 9, kI, kI, kI, kI));
  EXPECT_THAT(last.position_ids, ElementsAre(0, 1, 2, kP, kP, kP));
  EXPECT_THROW(data.row(2), Error);
  EXPECT_EQ(row_or_padding(data, 2).labels, std::vector<int32_t>(6, kI));
  EXPECT_EQ(row_or_padding(data, 1).labels, last.labels);
}

TEST(PackedDataset, EachTokenIsPredictedOnceInAPass) {
  for (const int64_t seq_len : {1, 2, 3, 6, 7, 8, 50}) {
    const PackedDataset data(
        three_documents(),
        {.shape = {.seq_len = seq_len, .extra = 1}, .document_mask = false, .repeat = false});
    std::vector<int32_t> predicted;
    for (uint64_t i = 0; i < *data.num_rows(); ++i) {
      const Row row = data.row(i);
      for (size_t t = 0; t < static_cast<size_t>(seq_len); ++t) {
        if (row.labels[t] != kI) predicted.push_back(row.labels[t]);
      }
    }
    EXPECT_THAT(predicted, ElementsAre(2, 9, 9, 3, 4, 5, 9)) << seq_len;
  }
}

TEST(PackedDataset, ShufflesDocumentsAnewInEachPass) {
  std::vector<std::vector<int32_t>> documents;
  for (int32_t i = 0; i < 40; ++i) documents.push_back({i, 1000 + i});
  const PackingOptions options = {.shape = {.seq_len = 80}, .shuffle = true, .seed = 5};
  const PackedDataset data(corpus_of(documents), options);
  const auto first = data.row(0).input_ids, second = data.row(1).input_ids;
  EXPECT_NE(first, second);
  for (const auto& ids : {first, second}) {
    std::vector<int32_t> heads;
    for (size_t t = 0; t < ids.size(); t += 2) {
      EXPECT_EQ(ids[t] + 1000, ids[t + 1]);
      heads.push_back(ids[t]);
    }
    std::sort(heads.begin(), heads.end());
    std::vector<int32_t> all(40);
    std::iota(all.begin(), all.end(), 0);
    EXPECT_EQ(heads, all);
  }
  EXPECT_EQ(PackedDataset(corpus_of(documents), options).row(1).input_ids, second);
  auto other = options;
  other.seed = 6;
  EXPECT_NE(PackedDataset(corpus_of(documents), other).row(0).input_ids, first);
}

TEST(PackedDataset, CountsTheBytesOfLabels) {
  TokenizedCorpus corpus = three_documents();
  corpus.token_bytes = {0, 1, 2, 3, 4, 5, 0, 0, 0, 0};
  const PackedDataset data(std::move(corpus), {.shape = {.seq_len = 5, .extra = 2}});
  EXPECT_EQ(data.label_bytes(data.row(0)), 2 + 4);  // labels 2, 9 and 4; those of extra slots no
  const PackedDataset without(three_documents(), {.shape = {.seq_len = 5}});
  EXPECT_EQ(without.label_bytes(without.row(0)), std::nullopt);
}

TEST(PackedDataset, TheSmallestCorpora) {
  const PackedDataset pair(corpus_of({{7, 9}}), {.shape = {.seq_len = 4}, .repeat = false});
  EXPECT_EQ(pair.num_rows(), 1u);
  EXPECT_THAT(pair.row(0).labels, ElementsAre(9, kI, kI, kI));
  const PackedDataset endless(corpus_of({{7, 9}}), {.shape = {.seq_len = 5}});
  EXPECT_THAT(endless.row(1'000'000'001).input_ids, ElementsAre(9, 7, 9, 7, 9));
  EXPECT_THROW(PackedDataset(corpus_of({{9}}), {.shape = {.seq_len = 4}}), UserError);
  EXPECT_EQ(pair.info().max_id, 9);
}

// A run's position is one number. 64 documents, document i being five times the token 1000 + i;
// six steps on 4 ranks, then resumed on 2, then on 8.
void expect_ledger_without_gap(bool shuffle) {
  std::vector<std::vector<int32_t>> documents;
  for (int32_t i = 0; i < 64; ++i) documents.push_back(std::vector<int32_t>(5, 1000 + i));
  const PackingOptions options = {.shape = {.seq_len = 6}, .shuffle = shuffle, .seed = 1};
  constexpr uint64_t kBatch = 8;
  std::vector<int32_t> consumed;
  uint64_t position = 0;
  for (const uint64_t num_ranks : {4, 2, 8}) {
    const PackedDataset data(corpus_of(documents), options);  // a new process
    for (int step = 0; step < 6; ++step, position += kBatch) {
      for (uint64_t rank = 0; rank < num_ranks; ++rank) {
        const RowRange range = rows_of_rank({position, kBatch, rank, num_ranks});
        for (uint64_t i = range.first; i < range.first + range.count; ++i) {
          const auto ids = data.row(i).input_ids;
          consumed.insert(consumed.end(), ids.begin(), ids.end());
        }
      }
    }
  }
  ASSERT_EQ(consumed.size(), 3u * 6 * kBatch * 6);
  if (shuffle) {
    // Rows come in an order of their own within blocks of 54 (a pass of 319 labels cut by 6). Two
    // blocks are 648 tokens of the stream: each document's five tokens twice, and 8 of the next
    // pass.
    std::map<int32_t, int> count;
    for (size_t t = 0; t < 648; ++t) ++count[consumed[t]];
    EXPECT_EQ(count.size(), 64u);
    int beyond = 0;
    for (const auto& [id, times] : count) {
      EXPECT_GE(times, 10) << id;
      beyond += times - 10;
    }
    EXPECT_EQ(beyond, 8);
    return;
  }
  // Two whole passes and a part: in each, every document once, whole and in one piece.
  for (size_t pass = 0; pass < 2; ++pass) {
    std::map<int32_t, int> count;
    for (size_t t = pass * 320; t < (pass + 1) * 320; ++t) {
      EXPECT_EQ(consumed[t], consumed[t - t % 5]) << "slot " << t;
      ++count[consumed[t]];
    }
    EXPECT_EQ(count.size(), 64u);
    for (const auto& [id, times] : count) EXPECT_EQ(times, 5) << id;
  }
}

TEST(PackedDataset, ALedgerAcrossRankCountsHasNoRepeatAndNoGap) {
  expect_ledger_without_gap(false);
  expect_ledger_without_gap(true);
}

}  // namespace
}  // namespace longhaul::data
