// Tensor parallelism with sequence parallelism: the model under its plan computes what it does on
// one rank, and communicates where the plan says and nowhere else.
#include "longhaul/parallel/tensor.h"

#include <gmock/gmock.h>

#include "tests/parallel/ranks_of_model.h"

namespace longhaul::testing {
namespace {

using dtensor::CollectiveKind;
using ::testing::HasSubstr;

// As Job's, with heads for 4 ranks.
Job four_heads() {
  Job job;
  job.config.num_attention_heads = 4;
  return job;
}

const std::vector<RankLayout> kLayouts = {
    {.tp = 2},
    {.tp = 4},
    {.dp = 2, .tp = 2},
    {.cp = 2, .tp = 2},
    {.dp = 2, .ep = 4, .tp = 2},
    {.cp = 2, .ep = 2, .tp = 2, .split = SequenceSplit::kContiguous},
    {.dp = 2, .cp = 2, .ep = 8, .tp = 2},
};

void expect_same_on_all_layouts(const Job& job) {
  const Outcome expected = on_one_rank(job);
  for (const auto& layout : kLayouts) {
    SCOPED_TRACE(layout.text());
    expect_same(on_ranks(layout, job), expected, 1e-11);
  }
}

TEST(TensorParallel, EqualsOneRank) { expect_same_on_all_layouts(four_heads()); }

TEST(TensorParallel, ExpandedForm) {
  Job job = four_heads();
  job.settings.mla_form = v3::MlaForm::kExpanded;
  expect_same_on_all_layouts(job);
}

TEST(TensorParallel, WithoutQueryLatent) {
  Job job = four_heads();
  job.config.q_lora_rank = 0;
  expect_same_on_all_layouts(job);
}

TEST(TensorParallel, RecomputedBlocks) {
  Job job = four_heads();
  job.settings.recompute.every = 1;
  expect_same_on_all_layouts(job);
}

TEST(TensorParallel, FrozenTrunk) {
  Job job = four_heads();
  job.settings.stage = v3::IndexerStage::kDenseWarmup;
  expect_same_on_all_layouts(job);
}

TEST(TensorParallel, RotatedIndexer) {
  Job job = four_heads();
  job.settings.hadamard = true;
  expect_same_on_all_layouts(job);
}

TEST(TensorParallel, DenseAttention) {
  Job job = four_heads();
  job.settings.stage = v3::IndexerStage::kOff;
  expect_same_on_all_layouts(job);
}

TEST(TensorParallel, TwoRunsAreEqualBitByBit) {
  const Job job = four_heads();
  const RankLayout layout = {.dp = 2, .tp = 2};
  expect_same(on_ranks(layout, job), on_ranks(layout, job), 1e-300);
}

TEST(TensorParallel, HeadsThatCannotBeDealtOut) {
  Job job;
  job.config.num_attention_heads = 3;
  try {
    on_ranks({.tp = 2}, job);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(),
                AllOf(HasSubstr("tensor_parallel_degree 2"), HasSubstr("3 attention heads")));
  }
}

// The routed branch of a layer of experts: no gather, no scatter, one top-k for each token.
TEST(TensorParallel, TheRoutedBranchDoesNotCommunicate) {
  const Job job = four_heads();
  const auto calls = [&](int64_t shared_experts) {
    Job with = job;
    with.config.n_shared_experts = shared_experts;
    std::map<CollectiveKind, int64_t> counted;
    test::run_ranks(2, [&](dtensor::World& world) {
      RankOfModel rank(world, {.tp = 2}, with);
      world.log().clear();
      rank.forward();
      int64_t routed = 0;
      for (const auto& [layer, counts] : rank.stats().expert_counts) {
        routed += counts.sum().item<int64_t>();
      }
      if (world.rank() != 0) return;
      for (const auto kind : {CollectiveKind::kAllGather, CollectiveKind::kReduceScatter,
                              CollectiveKind::kAllToAll}) {
        counted[kind] = static_cast<int64_t>(world.log().total(kind, "tp").count);
      }
      int64_t expected = 0;
      const auto single = on_one_rank(with);
      for (const auto& [layer, counts] : single.run.stats.expert_counts) {
        expected += counts.sum().item<int64_t>();
      }
      EXPECT_EQ(routed, expected);
    });
    return counted;
  };
  const auto with = calls(1), without = calls(0);
  const int64_t layers = 3;  // with experts: one of the trunk and two MTP modules
  EXPECT_EQ(with.at(CollectiveKind::kAllGather) - without.at(CollectiveKind::kAllGather), layers);
  EXPECT_EQ(with.at(CollectiveKind::kReduceScatter) - without.at(CollectiveKind::kReduceScatter),
            layers);
  EXPECT_EQ(with.at(CollectiveKind::kAllToAll), 0);
}

}  // namespace
}  // namespace longhaul::testing
