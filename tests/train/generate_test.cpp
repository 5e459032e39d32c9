#include "longhaul/train/generate.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace longhaul::train {
namespace {

TEST(Generate, GreedyTakesTheLargestAndTheLowestAmongEquals) {
  EXPECT_EQ(sample_token(at::tensor({0.0, 3.0, 1.0}), 0, 1, 0.99), 1);
  EXPECT_EQ(sample_token(at::tensor({2.0, 5.0, 5.0}), 0, 1, 0.5), 1);
}

TEST(Generate, DrawsFollowTheProbabilities) {
  const auto logits = at::tensor({0.5, 0.25, 0.25}, at::kDouble).log();
  EXPECT_EQ(sample_token(logits, 1, 1, 0.0), 0);
  EXPECT_EQ(sample_token(logits, 1, 1, 0.499), 0);
  EXPECT_EQ(sample_token(logits, 1, 1, 0.501), 1);
  EXPECT_EQ(sample_token(logits, 1, 1, 0.751), 2);
  EXPECT_EQ(sample_token(logits, 1, 1, 1.0 - 1e-16), 2);
}

TEST(Generate, TopPKeepsTheSmallestSetWithEnoughMass) {
  const auto logits = at::tensor({0.1, 0.6, 0.3}, at::kDouble).log();
  // 0.6 is not enough for 0.7, 0.6 + 0.3 is: the third never comes.
  EXPECT_EQ(sample_token(logits, 1, 0.7, 0.0), 1);
  EXPECT_EQ(sample_token(logits, 1, 0.7, 0.999), 2);
  EXPECT_EQ(sample_token(logits, 1, 0.6, 0.999), 1);
  EXPECT_EQ(sample_token(logits, 1, 0.0, 0.999), 1);  // the likeliest always stays
}

}  // namespace
}  // namespace longhaul::train
