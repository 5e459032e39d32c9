// Document boundaries, padding and the shift of MTP, all settled on the host before a pass.
#include <gmock/gmock.h>

#include "longhaul/base/error.h"
#include "tests/models/tiny_model.h"

namespace longhaul::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<int64_t> ids(const at::Tensor& x) {
  const auto c = x.to(at::kLong).contiguous();
  return {c.data_ptr<int64_t>(), c.data_ptr<int64_t>() + c.numel()};
}

at::Tensor row(const std::vector<int64_t>& values) {
  return at::tensor(values, at::kLong).unsqueeze(0);
}

TEST(DocumentStarts, RestartsPaddingAndChunks) {
  // A document, one of length 1, padding, a document, then one that begins in its middle.
  const auto starts = v3::document_starts(row({0, 1, 2, 0, -1, -1, 0, 1, 7, 8, 9, -1, 10}));
  EXPECT_THAT(ids(starts), ElementsAre(0, 0, 0, 3, 5, 6, 6, 6, 8, 8, 8, 12, 12));
  EXPECT_THAT(ids(v3::document_starts(row({0}))), ElementsAre(0));
  EXPECT_THAT(ids(v3::document_starts(row({-1}))), ElementsAre(1));
  EXPECT_THAT(ids(v3::document_starts(row({4096, 4097}))), ElementsAre(0, 0));
}

TEST(DocumentStarts, RowsDoNotTouch) {
  const auto positions = at::cat({row({0, 1, 2}), row({3, 4, 0}), row({1, 2, 3})}, 0);
  EXPECT_THAT(ids(v3::document_starts(positions)), ElementsAre(0, 0, 0, 0, 0, 2, 0, 0, 0));
}

// Tokens A0 A1 A2 B0 B1 B2 B3 with positions 0 1 2 0 1 2 3, padded so that depth 2 has its slots.
TEST(PrepareBatch, MtpShiftStopsAtDocumentEdges) {
  const std::vector<int64_t> tokens = {100, 101, 102, 200, 201, 202, 203, 9, 9};
  const std::vector<int64_t> positions = {0, 1, 2, 0, 1, 2, 3, -1, -1};
  const std::vector<int64_t> labels = {101, 102, -100, 201, 202, 203, -100, 9, 9};
  const auto batch = v3::prepare_batch(row(tokens), row(labels), row(positions), 7);
  ASSERT_EQ(batch.towers.size(), 3U);
  EXPECT_THAT(ids(batch.towers[0].input_ids), ElementsAre(100, 101, 102, 200, 201, 202, 203));
  // A slot without its token reads id 0, and is not valid.
  EXPECT_THAT(ids(batch.towers[1].input_ids), ElementsAre(101, 102, 0, 201, 202, 203, 0));
  EXPECT_THAT(ids(batch.towers[2].input_ids), ElementsAre(102, 0, 0, 202, 203, 0, 0));
  EXPECT_THAT(ids(batch.towers[1].valid), ElementsAre(1, 1, 0, 1, 1, 1, 0));
  EXPECT_THAT(ids(batch.towers[2].valid), ElementsAre(1, 0, 0, 1, 1, 0, 0));
  EXPECT_THAT(ids(batch.towers[1].labels), ElementsAre(102, -100, -100, 202, 203, -100, -100));
  EXPECT_THAT(ids(batch.towers[2].labels), ElementsAre(-100, -100, -100, 203, -100, -100, -100));
  // Slots keep their own rope position and document.
  for (const auto& slots : batch.towers) {
    EXPECT_THAT(ids(slots.positions), ElementsAre(0, 1, 2, 0, 1, 2, 3));
  }
  EXPECT_THAT(ids(batch.towers[1].doc_start), ElementsAre(0, 0, 3, 3, 3, 3, 7));
  EXPECT_EQ(batch.towers[0].num_tokens, 7);
  EXPECT_EQ(batch.towers[0].num_labels, 5);
  EXPECT_EQ(batch.towers[1].num_tokens, 5);
  EXPECT_EQ(batch.towers[1].num_labels, 3);
  EXPECT_EQ(batch.towers[2].num_tokens, 3);
  EXPECT_EQ(batch.towers[2].num_labels, 1);
}

TEST(PrepareBatch, ReadsTheTokensBeyondTheTrunk) {
  const auto batch = v3::prepare_batch(row({10, 11, 12, 13, 14}), row({11, 12, 13, 14, 15}),
                                       row({0, 1, 2, 3, 4}), 3);
  EXPECT_THAT(ids(batch.towers[1].input_ids), ElementsAre(11, 12, 13));
  EXPECT_THAT(ids(batch.towers[2].input_ids), ElementsAre(12, 13, 14));
  EXPECT_THAT(ids(batch.towers[2].labels), ElementsAre(13, 14, 15));
  EXPECT_EQ(batch.towers[2].num_tokens, 3);
}

TEST(PrepareBatch, PaddingIsMasked) {
  const auto batch = v3::prepare_batch(row({5, 777, 6}), row({6, 777, 7}), row({0, -1, 0}), 3);
  const auto& slots = batch.towers[0];
  EXPECT_THAT(ids(slots.input_ids), ElementsAre(5, 0, 6));
  EXPECT_THAT(ids(slots.labels), ElementsAre(6, -100, 7));
  EXPECT_THAT(ids(slots.positions), ElementsAre(0, 0, 0));
  EXPECT_THAT(ids(slots.doc_start), ElementsAre(0, 2, 2));
  EXPECT_EQ(slots.num_tokens, 2);
  EXPECT_EQ(slots.num_labels, 2);
}

TEST(GlobalCounts, AddUpOverMicroBatches) {
  const auto batch = tiny_batch();
  v3::GlobalCounts counts;
  counts.add(batch);
  counts.add(batch);
  ASSERT_EQ(counts.tokens.size(), 3U);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(counts.tokens[i], 2 * batch.towers[i].num_tokens);
    EXPECT_EQ(counts.labels[i], 2 * batch.towers[i].num_labels);
  }
}

TEST(PrepareBatch, BadInput) {
  const auto x = at::zeros({2, 5}, at::kLong);
  EXPECT_THAT(message_of([&] {
                v3::prepare_batch(x, at::zeros({2, 4}, at::kLong), x, 5);
              }),
              HasSubstr("input_ids [2 x 5], labels [2 x 4]"));
  EXPECT_THAT(message_of([&] { v3::prepare_batch(x, x, x, 6); }), HasSubstr("seq_len 6"));
  EXPECT_THAT(message_of([&] { v3::prepare_batch(x[0], x[0], x[0], 5); }),
              HasSubstr("input_ids: expected 2 dimensions, got [5]"));
}

}  // namespace
}  // namespace longhaul::testing
