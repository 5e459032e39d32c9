#include "longhaul/data/best_fit_dataset.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "longhaul/base/error.h"

namespace longhaul::data {
namespace {

using testing::ElementsAre;

constexpr int32_t kI = kIgnoredLabel, kP = kPaddingPosition;

// Documents of these lengths; document i holds 100 * i, 100 * i + 1, ...
TokenizedCorpus corpus_of(const std::vector<int32_t>& lengths) {
  TokenizedCorpus corpus;
  for (size_t i = 0; i < lengths.size(); ++i) {
    for (int32_t t = 0; t < lengths[i]; ++t) {
      corpus.ids.push_back(100 * static_cast<int32_t>(i) + t);
    }
    corpus.document_ends.push_back(corpus.ids.size());
  }
  return corpus;
}

TEST(BestFit, FillsRowsWithWholeDocuments) {
  const BestFitDataset data(corpus_of({2, 4, 3, 1}), {.shape = {.seq_len = 5}, .repeat = false});
  ASSERT_EQ(data.num_rows(), 2u);
  const Row first = data.row(0), second = data.row(1);
  EXPECT_THAT(first.input_ids, ElementsAre(100, 101, 102, 103, 300));
  EXPECT_THAT(first.labels, ElementsAre(101, 102, 103, kI, kI));
  EXPECT_THAT(first.position_ids, ElementsAre(0, 1, 2, 3, 0));
  EXPECT_THAT(second.input_ids, ElementsAre(200, 201, 202, 0, 1));
  EXPECT_THAT(second.position_ids, ElementsAre(0, 1, 2, 0, 1));
}

TEST(BestFit, PadsWhatNoDocumentFills) {
  const BestFitDataset data(corpus_of({3, 3}),
                            {.shape = {.seq_len = 4, .extra = 1}, .repeat = false});
  ASSERT_EQ(data.num_rows(), 2u);
  EXPECT_THAT(data.row(1).input_ids, ElementsAre(100, 101, 102, 0, 0));
  EXPECT_THAT(data.row(1).labels, ElementsAre(101, 102, kI, kI, kI));
  EXPECT_THAT(data.row(1).position_ids, ElementsAre(0, 1, 2, kP, kP));
}

TEST(BestFit, CutsOnlyLongerDocuments) {
  const BestFitDataset data(corpus_of({8, 1}),
                            {.shape = {.seq_len = 3, .extra = 2}, .repeat = false});
  ASSERT_EQ(data.num_rows(), 3u);
  const Row first = data.row(0), last = data.row(2);
  // The extra slots and the last label look into the document's next piece.
  EXPECT_THAT(first.input_ids, ElementsAre(0, 1, 2, 3, 4));
  EXPECT_THAT(first.labels, ElementsAre(1, 2, 3, 4, 5));
  EXPECT_THAT(data.row(1).labels, ElementsAre(4, 5, 6, 7, kI));
  EXPECT_THAT(last.input_ids, ElementsAre(6, 7, 100, 0, 0));
  EXPECT_THAT(last.position_ids, ElementsAre(0, 1, 0, kP, kP));
}

TEST(BestFit, EachTokenStandsInOneRowOfAPass) {
  std::vector<int32_t> lengths;
  for (int32_t i = 0; i < 60; ++i) lengths.push_back(1 + i * 37 % 50);
  for (const int64_t seq_len : {1, 7, 16, 64}) {
    const BestFitDataset data(corpus_of(lengths),
                              {.shape = {.seq_len = seq_len}, .shuffle = true, .seed = 3});
    const auto rows = static_cast<uint64_t>(data.info().rows);
    std::multiset<int32_t> seen[2];
    for (uint64_t i = 0; i < 2 * rows; ++i) {
      const Row row = data.row(i);
      for (size_t t = 0; t < row.input_ids.size(); ++t) {
        if (row.position_ids[t] != kP) seen[i / rows].insert(row.input_ids[t]);
      }
    }
    const auto corpus = corpus_of(lengths);
    const std::multiset<int32_t> all(corpus.ids.begin(), corpus.ids.end());
    EXPECT_EQ(seen[0], all) << seq_len;
    EXPECT_EQ(seen[1], all) << seq_len;
    // Best fit decreasing wastes at most about 2/9 of what is needed.
    const auto needed =
        (corpus.ids.size() + static_cast<size_t>(seq_len) - 1) / static_cast<size_t>(seq_len);
    EXPECT_LE(rows, needed * 11 / 9 + 1) << seq_len;
    EXPECT_TRUE(rows <= 20 || data.row(0).input_ids != data.row(rows).input_ids);
  }
}

TEST(BestFit, BadInput) {
  EXPECT_THROW(BestFitDataset(corpus_of({1}), {.shape = {.seq_len = 4}}), UserError);
  EXPECT_THROW(BestFitDataset(corpus_of({3}), {.shape = {.seq_len = 4}, .document_mask = false}),
               Error);
  const BestFitDataset data(corpus_of({3}), {.shape = {.seq_len = 4}, .repeat = false});
  EXPECT_THROW(data.row(1), Error);
}

}  // namespace
}  // namespace longhaul::data
