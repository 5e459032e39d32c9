#include "longhaul/data/bpe.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

namespace longhaul::data {
namespace {

// The definition, step by step, over strings.
std::vector<std::string> slow_bpe(const std::string& text,
                                  const std::vector<std::pair<std::string, std::string>>& merges) {
  std::vector<std::string> tokens;
  for (const char byte : text) tokens.emplace_back(1, byte);
  while (true) {
    size_t best = merges.size(), place = 0;
    for (size_t i = 0; i + 1 < tokens.size(); ++i) {
      const auto found = std::find(merges.begin(), merges.begin() + static_cast<ptrdiff_t>(best),
                                   std::pair(tokens[i], tokens[i + 1]));
      const auto rank = static_cast<size_t>(found - merges.begin());
      if (rank < best) best = rank, place = i;
    }
    if (best == merges.size()) return tokens;
    tokens[place] += tokens[place + 1];
    tokens.erase(tokens.begin() + static_cast<ptrdiff_t>(place) + 1);
  }
}

struct Fixture {
  std::vector<std::pair<std::string, std::string>> merges;
  std::vector<std::string> tokens;
  BpeModel model;
};

// Random merges over the letters a to c, in random order: ranks that go down again, too.
Fixture random_model(unsigned seed, size_t num_merges, bool learnt_order) {
  std::mt19937 random(seed);
  Fixture f;
  std::map<std::string, int32_t> ids;
  const auto add = [&](const std::string& token) {
    if (ids.emplace(token, static_cast<int32_t>(f.tokens.size())).second) f.tokens.push_back(token);
  };
  for (const char* byte : {"a", "b", "c"}) add(byte);
  while (f.merges.size() < num_merges) {
    const std::pair pair(f.tokens[random() % f.tokens.size()],
                         f.tokens[random() % f.tokens.size()]);
    if (std::find(f.merges.begin(), f.merges.end(), pair) != f.merges.end()) continue;
    f.merges.push_back(pair);
    add(pair.first + pair.second);
  }
  if (!learnt_order) std::shuffle(f.merges.begin(), f.merges.end(), random);
  std::vector<Merge> merges;
  for (const auto& [l, r] : f.merges) merges.push_back({ids.at(l), ids.at(r), ids.at(l + r)});
  f.model = BpeModel(merges);
  return f;
}

std::vector<std::string> encode(const Fixture& f, const std::string& text) {
  BpeModel::Scratch scratch;
  for (const char byte : text) scratch.ids.push_back(byte - 'a');
  std::vector<int32_t> ids;
  f.model.encode(scratch, ids);
  std::vector<std::string> tokens;
  for (const int32_t id : ids) tokens.push_back(f.tokens[static_cast<size_t>(id)]);
  return tokens;
}

TEST(Bpe, ShortAndLongPiecesFollowTheDefinition) {
  for (unsigned seed = 0; seed < 60; ++seed) {
    const Fixture f = random_model(seed, 3 + seed % 20, seed % 2 == 0);
    std::mt19937 random(seed);
    for (const size_t size : {1ul, 2ul, 7ul, 60ul, BpeModel::kLongPiece - 1, BpeModel::kLongPiece,
                              BpeModel::kLongPiece + 1, 500ul}) {
      std::string text;
      for (size_t i = 0; i < size; ++i) text += static_cast<char>('a' + random() % (1 + seed % 3));
      ASSERT_EQ(encode(f, text), slow_bpe(text, f.merges)) << "seed " << seed << ", " << text;
    }
  }
}

TEST(Bpe, OverlapsGoToTheLeft) {
  const BpeModel model({{0, 0, 1}});
  BpeModel::Scratch scratch;
  std::vector<int32_t> ids;
  scratch.ids.assign(5, 0);
  model.encode(scratch, ids);
  EXPECT_THAT(ids, testing::ElementsAre(1, 1, 0));
  ids.clear();
  scratch.ids.assign(2001, 0);
  model.encode(scratch, ids);
  EXPECT_EQ(ids.size(), 1001u);
  EXPECT_EQ(ids.back(), 0);
}

TEST(Bpe, OfEqualMergesTheLaterRankCounts) {
  // a b -> ab, then b c -> bc, then a b once more: bc comes first now.
  const BpeModel model({{0, 1, 3}, {1, 2, 4}, {0, 1, 3}});
  BpeModel::Scratch scratch;
  scratch.ids = {0, 1, 2};
  std::vector<int32_t> ids;
  model.encode(scratch, ids);
  EXPECT_THAT(ids, testing::ElementsAre(0, 4));
}

TEST(Bpe, MegabytesWithoutABlank) {
  const Fixture f = random_model(4, 20, true);
  std::mt19937 random(3);
  std::string text(5'000'000, 'a');
  for (char& c : text) c = static_cast<char>('a' + random() % 3);
  std::string joined;
  for (const auto& token : encode(f, text)) joined += token;
  EXPECT_EQ(joined, text);
}

}  // namespace
}  // namespace longhaul::data
