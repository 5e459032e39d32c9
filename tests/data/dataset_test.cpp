#include "longhaul/data/dataset.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "longhaul/base/error.h"

namespace longhaul::data {
namespace {

using testing::ElementsAre;

// Tokens A0 A1 A2 B0 B1 B2 B3 as 10 11 12 20 21 22 23.
const std::vector<int32_t> kIds = {10, 11, 12, 20, 21, 22, 23};
const std::vector<int32_t> kPositions = {0, 1, 2, 0, 1, 2, 3};

TEST(Dataset, ShiftsStopAtTheEdgesOfDocuments) {
  EXPECT_THAT(shift_within_documents(kIds, kPositions, 0, -1), testing::ElementsAreArray(kIds));
  EXPECT_THAT(shift_within_documents(kIds, kPositions, 1, -1),
              ElementsAre(11, 12, -1, 21, 22, 23, -1));
  EXPECT_THAT(shift_within_documents(kIds, kPositions, 2, -1),
              ElementsAre(12, -1, -1, 22, 23, -1, -1));
  EXPECT_THAT(shift_within_documents(kIds, kPositions, 9, -1), testing::Each(-1));
}

TEST(Dataset, ShiftsLeavePaddingOut) {
  const std::vector<int32_t> ids = {10, 11, 0, 0}, positions = {0, 1, -1, -1};
  EXPECT_THAT(shift_within_documents(ids, positions, 1, -100), ElementsAre(11, -100, -100, -100));
}

TEST(Dataset, RanksShareAStepInOrder) {
  const auto range = [](uint64_t rank) { return rows_of_rank({100, 12, rank, 3}); };
  EXPECT_EQ(range(0).first, 100u);
  EXPECT_EQ(range(1).first, 104u);
  EXPECT_EQ(range(2).first, 108u);
  EXPECT_EQ(range(2).count, 4u);
  EXPECT_THROW(rows_of_rank({0, 10, 0, 3}), Error);
  EXPECT_THROW(rows_of_rank({0, 12, 3, 3}), Error);
}

TEST(Dataset, PaddingRow) {
  const Row row = padding_row({.seq_len = 2, .extra = 1});
  EXPECT_THAT(row.input_ids, ElementsAre(0, 0, 0));
  EXPECT_THAT(row.labels, ElementsAre(-100, -100, -100));
  EXPECT_THAT(row.position_ids, ElementsAre(-1, -1, -1));
}

}  // namespace
}  // namespace longhaul::data
