// Which ranks form which group, written out for meshes small enough to count on one's fingers.
#include "longhaul/parallel/parallel_dims.h"

#include <gtest/gtest.h>

#include "longhaul/base/error.h"
#include "longhaul/config/load.h"

namespace longhaul::parallel {
namespace {

using Ranks = std::vector<int>;

std::vector<std::string> words(int replicate, int shard, int cp, int tp, int ep) {
  const auto key = [](const char* name) { return fmt::format("--parallelism.{}", name); };
  return {key("data_parallel_replicate_degree"), std::to_string(replicate),
          key("data_parallel_shard_degree"),     std::to_string(shard),
          key("context_parallel_degree"),        std::to_string(cp),
          key("tensor_parallel_degree"),         std::to_string(tp),
          key("expert_parallel_degree"),         std::to_string(ep)};
}

// The groups that `rank` of `size` would have; no other rank is needed for that.
ParallelDims dims_of(int rank, int size, const std::vector<std::string>& overrides) {
  static std::vector<dtensor::World> worlds;  // the groups' logs
  worlds.reserve(100);
  worlds.push_back(dtensor::World::fake(rank, size));
  return ParallelDims::make(parse_job("", "job.toml", overrides), worlds.back());
}

TEST(ParallelDims, TheGroupsOfEveryKindOnSixteenRanks) {
  // rank = ((replicate * 2 + shard) * 2 + cp) * 2 + tp; rank 13 = (1, 1, 0, 1).
  const auto dims = dims_of(13, 16, words(2, -1, 2, 2, 4));
  EXPECT_EQ(dims.mesh->text(), "pp 1 x dp_replicate 2 x dp_shard 2 x cp 2 x tp 2");
  EXPECT_EQ(dims.mesh->axis("dp_replicate").global_ranks(), (Ranks{5, 13}));
  EXPECT_EQ(dims.mesh->axis("dp_shard").global_ranks(), (Ranks{9, 13}));
  EXPECT_EQ(dims.mesh->axis("cp").global_ranks(), (Ranks{13, 15}));
  EXPECT_EQ(dims.mesh->axis("tp").global_ranks(), (Ranks{12, 13}));
  EXPECT_EQ(dims.dp->global_ranks(), (Ranks{1, 5, 9, 13}));
  EXPECT_EQ(dims.fsdp->global_ranks(), (Ranks{9, 11, 13, 15}));
  EXPECT_EQ(dims.loss->global_ranks(), (Ranks{1, 3, 5, 7, 9, 11, 13, 15}));
  EXPECT_EQ(dims.all->size(), 16);
  // Of its replica's ranks 8 to 15, four at a time have all experts.
  EXPECT_EQ(dims.ep->global_ranks(), (Ranks{12, 13, 14, 15}));
  EXPECT_EQ(dims.efsdp->global_ranks(), (Ranks{9, 13}));
  EXPECT_EQ(dims.data_rank(), 3);
  EXPECT_EQ(dims.data_size(), 4);
}

TEST(ParallelDims, RanksThatShareASequenceReadTheSameRows) {
  Ranks data_ranks;
  for (int rank = 0; rank < 8; ++rank) {
    data_ranks.push_back(static_cast<int>(dims_of(rank, 8, words(1, 2, 2, 2, 1)).data_rank()));
  }
  EXPECT_EQ(data_ranks, (Ranks{0, 0, 0, 0, 1, 1, 1, 1}));
}

TEST(ParallelDims, WithoutExpertParallelismAllOfAReplicaShareTheExperts) {
  const auto dims = dims_of(5, 8, words(2, 2, 1, 2, 1));
  EXPECT_EQ(dims.efsdp->global_ranks(), (Ranks{4, 5, 6, 7}));
  EXPECT_EQ(dims.ep->global_ranks(), (Ranks{5}));
}

TEST(ParallelDims, OneRankIsAloneEverywhere) {
  dtensor::World world = dtensor::World::single();
  const auto dims = ParallelDims::make(parse_job("", "job.toml"), world);
  for (const auto& group : {dims.all, dims.dp, dims.fsdp, dims.loss, dims.efsdp, dims.ep}) {
    EXPECT_EQ(group->size(), 1) << group->axis();
  }
  EXPECT_TRUE(dims.is_first());
}

std::string refusal(int size, const std::vector<std::string>& overrides) {
  try {
    dims_of(0, size, overrides);
  } catch (const UserError& error) {
    return error.what();
  }
  return "";
}

TEST(ParallelDims, WhatDoesNotFitIsRefused) {
  EXPECT_EQ(refusal(2, {"--parallelism.pipeline_parallel_degree", "2"}),
            "command line: parallelism.pipeline_parallel_degree: 2: the layers cannot be dealt to "
            "stages yet; set it to 1");
  auto etp = words(1, 2, 1, 2, 2);
  etp.insert(etp.end(), {"--parallelism.expert_tensor_parallel_degree", "2"});
  EXPECT_EQ(refusal(4, etp),
            "command line: parallelism.expert_tensor_parallel_degree: 2: an expert's matrices "
            "cannot be cut yet; set it to 1");
  EXPECT_EQ(refusal(4, words(1, 3, 1, 1, 1)),
            "4 ranks = dp_replicate 1 x dp_shard 3 x cp 1 x tp 1 x pp 1: the product is 3, not 4");
}

}  // namespace
}  // namespace longhaul::parallel
