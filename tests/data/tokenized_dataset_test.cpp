#include "longhaul/data/tokenized_dataset.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "longhaul/base/error.h"
#include "tests/data/temporary_folder.h"

namespace longhaul::data {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr int32_t kI = kIgnoredLabel, kP = kPaddingPosition;

class TokenizedDatasetTest : public testing::Test {
 protected:
  TokenizedDataset open(const std::string& text, TokenizedOptions options) {
    return TokenizedDataset(list_files(folder_.write("rows.jsonl", text)), options);
  }
  TokenizedDataset open(const std::string& text) {
    return open(text, {.shape = {.seq_len = 4}, .vocab_size = 100, .repeat = false});
  }
  std::string error_of(const std::string& text) {
    return user_error([&] { open(text); });
  }

  TemporaryFolder folder_;
};

TEST_F(TokenizedDatasetTest, OnlyIds) {
  const auto data = open(R"({"input_ids": [5, 6, 7, 8]})");
  const Row row = data.row(0);
  EXPECT_THAT(row.input_ids, ElementsAre(5, 6, 7, 8));
  EXPECT_THAT(row.labels, ElementsAre(6, 7, 8, kI));
  EXPECT_THAT(row.position_ids, ElementsAre(0, 1, 2, 3));
}

TEST_F(TokenizedDatasetTest, PositionsMakeTheLabels) {
  const auto data = open(R"({"input_ids": [5, 6, 7, 0], "position_ids": [0, 1, 0, -1]})");
  EXPECT_THAT(data.row(0).labels, ElementsAre(6, kI, kI, kI));
  EXPECT_THAT(data.row(0).position_ids, ElementsAre(0, 1, 0, kP));
  EXPECT_EQ(data.info().documents, 2);
  EXPECT_EQ(data.info().tokens, 3);
}

TEST_F(TokenizedDatasetTest, GivenLabelsStay) {
  const auto data = open(R"({"input_ids": [5, 6, 7, 8], "labels": [-100, 9, 9, 99]})");
  EXPECT_THAT(data.row(0).labels, ElementsAre(kI, 9, 9, 99));
  EXPECT_EQ(data.info().max_id, 99);
}

TEST_F(TokenizedDatasetTest, ExtraSlotsArePadding) {
  const auto data = open(R"({"input_ids": [5, 6, 7, 8]})", {.shape = {.seq_len = 4, .extra = 2}});
  const Row row = data.row(0);
  EXPECT_THAT(row.input_ids, ElementsAre(5, 6, 7, 8, 0, 0));
  EXPECT_THAT(row.labels, ElementsAre(6, 7, 8, kI, kI, kI));
  EXPECT_THAT(row.position_ids, ElementsAre(0, 1, 2, 3, kP, kP));
}

TEST_F(TokenizedDatasetTest, FileOrderBlankLinesAndRepetition) {
  const std::string text =
      "\n{\"input_ids\": [1, 1, 1, 1], \"id\": \"x\"}\r\n  \n{\"input_ids\": [2, 2, 2, 2]}";
  const auto once = open(text);
  EXPECT_EQ(once.num_rows(), 2u);
  EXPECT_EQ(once.row(1).input_ids[0], 2);
  EXPECT_THROW(once.row(2), Error);
  const auto endless = open(text, {.shape = {.seq_len = 4}});
  EXPECT_EQ(endless.num_rows(), std::nullopt);
  EXPECT_EQ(endless.row(4).input_ids[0], 1);
  EXPECT_EQ(endless.row(7).input_ids[0], 2);
}

TEST_F(TokenizedDatasetTest, SeveralFiles) {
  const auto b = folder_.write("b.jsonl", R"({"input_ids": [2, 2, 2, 2]})");
  const auto a = folder_.write("a.jsonl", R"({"input_ids": [1, 1, 1, 1]})");
  const TokenizedDataset data(list_files(b + "," + a), {.shape = {.seq_len = 4}});
  EXPECT_EQ(data.row(0).input_ids[0], 2);
  EXPECT_EQ(data.row(1).input_ids[0], 1);
}

TEST_F(TokenizedDatasetTest, ErrorsNameFileAndLine) {
  const std::string good = "{\"input_ids\": [1, 2, 3, 4]}\n\n";
  const auto third = [&](const std::string& line) { return error_of(good + line); };
  EXPECT_THAT(third(R"({"input_ids": [1, 2, 3]})"),
              AllOf(HasSubstr("rows.jsonl:3: "), HasSubstr("3 numbers, expected 4 (seq_len)")));
  EXPECT_THAT(third(R"({"input_ids": [1, 2, 3, 100]})"), HasSubstr("input_ids[3] is 100"));
  EXPECT_THAT(third(R"({"input_ids": [1, 2, -3, 4]})"), HasSubstr("input_ids[2] is -3"));
  EXPECT_THAT(third(R"({"input_ids": [1, 2.5, 3, 4]})"), HasSubstr("input_ids[1] is 2.5"));
  EXPECT_THAT(third(R"({"input_ids": [1, "2", 3, 4]})"), HasSubstr("input_ids[1] is \"2\""));
  EXPECT_THAT(third(R"({"input_ids": [1, 5000000000, 3, 4]})"), HasSubstr("5000000000"));
  EXPECT_THAT(third(R"({"input_ids": 7})"), HasSubstr("not an array"));
  EXPECT_THAT(third(R"({"ids": [1, 2, 3, 4]})"), HasSubstr("input_ids is missing"));
  EXPECT_THAT(third(R"([1, 2, 3, 4])"), HasSubstr("expected an object"));
  EXPECT_THAT(third(R"({"input_ids": [1, 2,)"), HasSubstr(":3: not valid JSON"));
  EXPECT_THAT(third("{\"input_ids\": [1, 2, 3, 4], \"\xFF\": 1}"), HasSubstr("not valid JSON"));
  EXPECT_THAT(third(R"({"input_ids": [1, 2, 3, 4], "label": []})"),
              HasSubstr("did you mean 'labels'?"));
}

TEST_F(TokenizedDatasetTest, BadLabelsAndPositions) {
  const auto with = [&](const std::string& rest) {
    return error_of(R"({"input_ids": [1, 2, 3, 4], )" + rest + "}");
  };
  EXPECT_THAT(with(R"("labels": [1, 2, 3])"), HasSubstr("labels has 3 numbers"));
  EXPECT_THAT(with(R"("labels": [1, 2, 3, -1])"), HasSubstr("labels[3] is -1"));
  EXPECT_THAT(with(R"("labels": [1, 2, 3, 100])"), HasSubstr("labels[3] is 100"));
  EXPECT_THAT(with(R"("position_ids": [0, 1, 3, 4])"),
              HasSubstr("position_ids[2] is 3, expected 2 or 0"));
  EXPECT_THAT(with(R"("position_ids": [4, 5, 6, 7])"), HasSubstr("position_ids[0] is 4"));
  EXPECT_THAT(with(R"("position_ids": [0, 1, -2, 0])"), HasSubstr("position_ids[2] is -2"));
  EXPECT_THAT(with(R"("position_ids": [0, 1, -1, 2])"), HasSubstr("position_ids[3] is 2"));
  EXPECT_THAT(with(R"("labels": [2, 3, 4, 5], "position_ids": [0, 1, 2, -1])"),
              HasSubstr("labels[3] is 5 at padding"));
}

TEST_F(TokenizedDatasetTest, AnEmptyFileIsAnError) {
  EXPECT_THAT(error_of(""), HasSubstr("rows.jsonl: the file holds no rows"));
  EXPECT_THAT(error_of("\n \n"), HasSubstr("no rows"));
}

}  // namespace
}  // namespace longhaul::data
