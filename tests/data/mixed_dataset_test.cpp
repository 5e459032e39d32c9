#include "longhaul/data/mixed_dataset.h"

#include <gtest/gtest.h>

#include "longhaul/base/error.h"
#include "longhaul/data/packed_dataset.h"

namespace longhaul::data {
namespace {

// `documents` documents of two ids: `mark` and the document's number.
std::unique_ptr<Dataset> marked(int32_t mark, int32_t documents, bool repeat) {
  TokenizedCorpus corpus;
  for (int32_t i = 0; i < documents; ++i) {
    corpus.ids.insert(corpus.ids.end(), {mark, i});
    corpus.document_ends.push_back(corpus.ids.size());
  }
  return std::make_unique<PackedDataset>(std::move(corpus),
                                         PackingOptions{.shape = {.seq_len = 2}, .repeat = repeat});
}

MixedDataset mixture(const std::vector<int32_t>& documents, const std::vector<double>& weights,
                     bool repeat) {
  std::vector<std::unique_ptr<Dataset>> members;
  for (size_t i = 0; i < documents.size(); ++i) {
    members.push_back(marked(static_cast<int32_t>(100 * i), documents[i], repeat));
  }
  return MixedDataset(std::move(members), weights);
}

TEST(Turns, HaveTheirSharesAtAnyPoint) {
  const std::vector<double> weights = {5, 1, 3, 0.01};
  const Turns turns(weights);
  std::vector<uint64_t> counts(weights.size());
  for (uint64_t turn = 0; turn < 3 * Turns::kPeriod; ++turn) {
    const size_t member = turns.member(turn);
    ASSERT_EQ(turns.count_before(member, turn), counts[member]) << turn;
    ASSERT_EQ(turns.turn_of(member, counts[member]), turn);
    ++counts[member];
    if (turn % 1000 != 0) continue;
    for (size_t i = 0; i < weights.size(); ++i) {
      ASSERT_NEAR(static_cast<double>(counts[i]), static_cast<double>(turn + 1) * weights[i] / 9.01,
                  3.0);
    }
  }
}

TEST(Turns, OfASingleMemberAndOfTooSmallAShare) {
  EXPECT_EQ(Turns({0.5}).count_before(0, 100'000), 100'000u);
  EXPECT_THROW(Turns({1.0, 1e-9}), UserError);
}

TEST(MixedDataset, EachMemberGoesOnWhereItWas) {
  const MixedDataset data = mixture({5, 3}, {2, 1}, true);
  std::vector<int32_t> next(2), counts(2);
  for (uint64_t i = 0; i < 300; ++i) {
    const Row row = data.row(i);
    const auto member = static_cast<size_t>(row.input_ids[0] / 100);
    EXPECT_EQ(row.input_ids[1], next[member]);
    next[member] = (next[member] + 1) % (member == 0 ? 5 : 3);
    ++counts[member];
  }
  EXPECT_EQ(counts, (std::vector<int32_t>{200, 100}));
  EXPECT_EQ(data.num_rows(), std::nullopt);
  EXPECT_EQ(data.info().documents, 8);
}

// Like a stream it knows its end only once it was asked for a row behind it.
class LateEnd : public Dataset {
 public:
  explicit LateEnd(uint64_t rows) : rows_(rows) {}
  Row row(uint64_t) const override { return padding_row(shape()); }
  bool has_row(uint64_t index) const override {
    known_ = known_ || index >= rows_;
    return index < rows_;
  }
  std::optional<uint64_t> num_rows() const override {
    return known_ ? std::optional(rows_) : std::nullopt;
  }
  DatasetInfo info() const override { return {}; }
  RowShape shape() const override { return {.seq_len = 2}; }
  std::optional<int64_t> label_bytes(const Row&) const override { return std::nullopt; }

 private:
  const uint64_t rows_;
  mutable bool known_ = false;
};

TEST(MixedDataset, TheEndIsTheFirstOneAlsoWhereItIsKnownLast) {
  for (const bool first_ends : {false, true}) {
    std::vector<std::unique_ptr<Dataset>> members;
    members.push_back(std::make_unique<LateEnd>(first_ends ? 3 : 50));
    members.push_back(std::make_unique<LateEnd>(first_ends ? 50 : 3));
    const MixedDataset data(std::move(members), {1, 1});
    EXPECT_EQ(data.num_rows(), std::nullopt);
    EXPECT_FALSE(data.has_row(200));
    ASSERT_TRUE(data.num_rows().has_value());
    EXPECT_LE(*data.num_rows(), 7u);
    EXPECT_TRUE(data.has_row(*data.num_rows() - 1));
    EXPECT_FALSE(data.has_row(*data.num_rows()));
  }
}

TEST(MixedDataset, EndsWithTheFirstMemberThatEnds) {
  const MixedDataset data = mixture({50, 3}, {1, 1}, false);
  ASSERT_TRUE(data.num_rows().has_value());
  const uint64_t rows = *data.num_rows();
  EXPECT_GE(rows, 6u);
  EXPECT_LE(rows, 7u);
  for (uint64_t i = 0; i < rows; ++i) {
    EXPECT_TRUE(data.has_row(i)) << i;
    data.row(i);
  }
  for (uint64_t i = rows; i < rows + 10; ++i) EXPECT_FALSE(data.has_row(i)) << i;
  EXPECT_EQ(row_or_padding(data, rows).labels, std::vector<int32_t>(2, kIgnoredLabel));
}

}  // namespace
}  // namespace longhaul::data
