#include "longhaul/base/rng.h"

#include <gtest/gtest.h>

#include <cmath>

namespace longhaul {
namespace {

// Known answers of the authors' Random123 distribution (kat_vectors, philox4x32 10).
TEST(Rng, PhiloxKnownAnswers) {
  using Words = std::array<uint32_t, 4>;
  EXPECT_EQ(philox4x32({0, 0, 0, 0}, {0, 0}),
            (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  const uint32_t ones = 0xffffffff;
  EXPECT_EQ(philox4x32({ones, ones, ones, ones}, {ones, ones}),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Rng, NormalHasMeanZeroAndVarianceOne) {
  const CounterRng rng(7, "model.layers.0.self_attn.o_proj.weight");
  double sum = 0, squares = 0, fourth = 0;
  const int count = 200000;
  for (int i = 0; i < count; ++i) {
    const double x = rng.normal(i);
    sum += x;
    squares += x * x;
    fourth += x * x * x * x;
  }
  EXPECT_NEAR(sum / count, 0, 0.01);
  EXPECT_NEAR(squares / count, 1, 0.015);
  EXPECT_NEAR(fourth / count, 3, 0.1);
}

TEST(Rng, DependsOnSeedNameAndIndexOnly) {
  EXPECT_EQ(CounterRng(1, "a").normal(5), CounterRng(1, "a").normal(5));
  EXPECT_NE(CounterRng(1, "a").normal(5), CounterRng(2, "a").normal(5));
  EXPECT_NE(CounterRng(1, "a").normal(5), CounterRng(1, "b").normal(5));
  EXPECT_NE(CounterRng(1, "a").normal(5), CounterRng(1, "a").normal(6));
}

}  // namespace
}  // namespace longhaul
