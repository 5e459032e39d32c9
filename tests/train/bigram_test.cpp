#include "longhaul/train/bigram.h"

#include <gtest/gtest.h>

#include <cmath>

namespace longhaul::train {
namespace {

// One row: 0 1 0 1 0 1 ..., each label the next token.
class Alternating : public data::Dataset {
 public:
  data::Row row(uint64_t) const override {
    data::Row row;
    for (int t = 0; t < 100; ++t) {
      row.input_ids.push_back(t % 2);
      row.labels.push_back((t + 1) % 2);
      row.position_ids.push_back(t);
    }
    return row;
  }
  std::optional<uint64_t> num_rows() const override { return 1; }
  data::DatasetInfo info() const override {
    data::DatasetInfo info;
    info.rows = 1;
    return info;
  }
  data::RowShape shape() const override { return {100, 0}; }
  std::optional<int64_t> label_bytes(const data::Row&) const override { return 200; }
};

TEST(Bigram, ValueByHand) {
  const Alternating data;
  const auto result = bigram_baseline(data, data, 2);
  // n(a) = 50, n(a, b) = 50, P(b) = 51 / 102, the unigram weighs 8 counts.
  const double expected = -std::log((50 + 8 * 0.5) / (50 + 8.0));
  EXPECT_NEAR(result.loss, expected, 1e-12);
  EXPECT_EQ(result.labels, 100);
  EXPECT_NEAR(*result.bits_per_byte, 100 * expected / std::log(2.0) / 200, 1e-12);
}

}  // namespace
}  // namespace longhaul::train
