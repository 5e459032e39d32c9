#include "longhaul/base/hash.h"

#include <gtest/gtest.h>

namespace longhaul {
namespace {

// XXH3-128 of nothing with seed 0, as in xxHash's own test vectors.
TEST(Hash, KnownAnswerOfNothing) { EXPECT_EQ(hash_hex(""), "99aa06d3014798d86001c324468d497f"); }

TEST(Hash, PiecesDoNotMatter) {
  std::string text;
  for (int i = 0; i < 5000; ++i) text.push_back(static_cast<char>(i * 31));
  for (const size_t piece : {1ul, 7ul, 255ul, 4096ul, 5000ul}) {
    Hasher hasher;
    for (size_t i = 0; i < text.size(); i += piece) {
      hasher.update(text.data() + i, std::min(piece, text.size() - i));
    }
    EXPECT_EQ(hasher.hex(), hash_hex(text)) << piece;
  }
}

TEST(Hash, OneBitChangesIt) {
  std::string text(1000, 'x');
  const std::string before = hash_hex(text);
  EXPECT_EQ(before.size(), 32u);
  text[500] ^= 1;
  EXPECT_NE(hash_hex(text), before);
}

}  // namespace
}  // namespace longhaul
