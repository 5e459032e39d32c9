// The order in which tensors are written.
#include "longhaul/checkpoint/save_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace longhaul::checkpoint {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// Shards of as many tensors as given, dealt to ranks in turn.
std::vector<Shard> shards_of(const std::vector<int>& sizes, int ranks) {
  std::vector<Shard> shards;
  for (size_t i = 0; i < sizes.size(); ++i) {
    Shard shard{.file = std::to_string(i), .tensors = {}, .writer = static_cast<int>(i) % ranks};
    for (int t = 0; t < sizes[i]; ++t) {
      shard.tensors.push_back({.name = fmt::format("{}.{}", i, t), .shape = {1}});
    }
    shards.push_back(shard);
  }
  return shards;
}

// "<shard>.<first tensor>" of each turn, with "+" for each further one.
std::vector<std::string> text_of(const std::vector<Turn>& turns) {
  std::vector<std::string> texts;
  for (const Turn& turn : turns) {
    texts.push_back(fmt::format("{}.{}", turn.shard, turn.begin) +
                    std::string(turn.end - turn.begin - 1, '+'));
  }
  return texts;
}

TEST(PlanTurns, RanksTakeTurns) {
  EXPECT_THAT(text_of(plan_turns(shards_of({2, 3, 1}, 3), 1, {})),
              ElementsAre("0.0", "1.0", "2.0", "0.1", "1.1", "1.2"));
  EXPECT_THAT(text_of(plan_turns(shards_of({2, 1, 1, 2}, 2), 1, {})),
              ElementsAre("0.0", "1.0", "0.1", "3.0", "2.0", "3.1"));
  EXPECT_THAT(plan_turns({}, 4, {}), IsEmpty());
}

TEST(PlanTurns, FilesOfOneRankToo) {
  EXPECT_THAT(text_of(plan_turns(shards_of({2, 2, 1}, 1), 2, {})),
              ElementsAre("0.0", "1.0", "0.1", "1.1", "2.0"));
}

TEST(PlanTurns, NeighboursOfOneSourceHaveOneTurn) {
  const int left = 0, right = 0;
  const SourceOf source = [&](const safetensors::TensorInfo& info) {
    return info.name.ends_with(".2") ? &right : &left;
  };
  EXPECT_THAT(text_of(plan_turns(shards_of({4, 2}, 2), 1, source)),
              ElementsAre("0.0+", "1.0+", "0.2", "0.3"));
}

TEST(CutIntoShards, ClosesAFileBeforeItIsTooLarge) {
  std::vector<safetensors::TensorInfo> tensors;
  for (const int64_t elements : {2, 3, 9, 0, 1}) {
    tensors.push_back({.name = fmt::format("t{}", elements), .shape = {elements}});
  }
  std::vector<int64_t> bytes;
  for (const Shard& shard : cut_into_shards(tensors, 20)) bytes.push_back(shard.bytes);
  EXPECT_THAT(bytes, ElementsAre(20, 36, 4));
}

}  // namespace
}  // namespace longhaul::checkpoint
