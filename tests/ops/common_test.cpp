#include "longhaul/ops/common.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "longhaul/base/error.h"
#include "tests/support/tensors.h"

namespace longhaul::testing {
namespace {

using ::testing::HasSubstr;

TEST(VisibleMask, StaysInTheDocumentAndThePast) {
  // Documents of 3 and 1 slots, 2 of padding, a document of 2.
  const auto mask = ops::visible_mask(doc_start({{3, 1, -2, 2}}));
  const auto see = mask.accessor<bool, 3>();
  const int64_t begin[] = {0, 0, 0, 3, 99, 99, 6, 6};
  for (int64_t t = 0; t < 8; ++t) {
    for (int64_t s = 0; s < 8; ++s) {
      EXPECT_EQ(see[0][t][s], s >= begin[t] && s <= t) << t << " sees " << s;
    }
  }
}

TEST(VisibleMask, OneSlot) {
  EXPECT_TRUE(ops::visible_mask(at::zeros({1, 1}, at::kLong)).item<bool>());
  EXPECT_FALSE(ops::visible_mask(at::ones({1, 1}, at::kLong)).item<bool>());
}

TEST(CheckShape, SaysWhatWasExpectedAndWhatCame) {
  const auto x = at::zeros({2, 3});
  EXPECT_NO_THROW(ops::check_shape(x, {2, ops::kAnySize}, "x"));
  EXPECT_THAT(message_of([&] {
                ops::check_shape(x, {2, 4}, "router bias");
              }),
              HasSubstr("router bias: expected [2 x 4], got [2 x 3]"));
  EXPECT_THAT(message_of([&] {
                ops::check_shape(x, {2, ops::kAnySize, 1}, "x");
              }),
              HasSubstr("x: expected [2 x any x 1], got [2 x 3]"));
}

TEST(WideType, IsNeverNarrowerThanFp32) {
  EXPECT_EQ(ops::wide_type(at::zeros({1}, at::kBFloat16)), at::kFloat);
  EXPECT_EQ(ops::wide_type(at::zeros({1}, at::kFloat)), at::kFloat);
  EXPECT_EQ(ops::wide_type(at::zeros({1}, at::kDouble)), at::kDouble);
}

}  // namespace
}  // namespace longhaul::testing
