// Tensor parallelism with sequence parallelism: the model under its plan computes what it does on
// one rank, and communicates where the plan says and nowhere else.
#include "longhaul/parallel/tensor.h"

#include <gmock/gmock.h>

#include <sstream>

#include "tests/parallel/collective_counts.h"
#include "tests/parallel/ranks_of_model.h"
#include "tests/support/log_capture.h"

namespace longhaul::testing {
namespace {

using dtensor::CollectiveKind;
using ::testing::HasSubstr;
using ::testing::Not;

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

// What the plan lays out is dealt out by every operator: what is gathered is a share's need, such
// as the keys that all heads see.
TEST(TensorParallel, NoOperatorIsComputedAlikeByAllRanks) {
  std::vector<Job> jobs(4, four_heads());
  jobs[1].settings.mla_form = v3::MlaForm::kExpanded;
  jobs[2].settings.stage = v3::IndexerStage::kDenseWarmup;
  jobs[3].settings.stage = v3::IndexerStage::kOff;
  const test::LogCapture log;
  for (const Job& job : jobs) on_ranks({.cp = 2, .ep = 2, .tp = 2}, job);
  EXPECT_THAT(log.text(), HasSubstr("is gathered along axis tp: each rank's share needs"));
  EXPECT_THAT(log.text(), Not(HasSubstr("every rank computes the same")));
}

// The CPU kernels, all of them, on parts: no layout takes another way but for the loss of a cut
// vocabulary. fp32 sums in another order.
TEST(TensorParallel, KernelsUnderFsdp) {
  Job job = four_heads();
  job.settings.param_dtype = job.settings.compute_dtype = at::kFloat;
  job.config.hidden_size = job.config.moe_intermediate_size = 32;
  job.prepare = [](v3::Model& model) {
    for (const auto& slot : model.kernels()) *slot.kernel = ops::Kernel::kFused;
  };
  const test::LogCapture log;
  const Outcome expected = on_one_rank(job);
  for (RankLayout layout : {RankLayout{.tp = 2}, RankLayout{.tp = 4}, RankLayout{.dp = 4},
                            RankLayout{.dp = 2, .ep = 4, .tp = 2}}) {
    layout.fsdp = true;
    SCOPED_TRACE(layout.text());
    expect_same(on_ranks(layout, job), expected, 2e-5);
  }
  std::istringstream lines(log.text());
  for (std::string line; std::getline(lines, line);) {
    if (line.find("the vocabulary is cut") != std::string::npos) continue;
    EXPECT_THAT(line, Not(HasSubstr("fused kernel is not used")));
  }
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

// Of a pass, on the tp axis.
struct Passes {
  Counts forward, backward;
  bool operator==(const Passes&) const = default;
};

// What rank 0 sees; that each token is routed once is checked on the way.
Passes passes_of(const RankLayout& layout, const Job& job) {
  Passes passes;
  test::run_ranks(layout.ranks(), [&](dtensor::World& world) {
    RankOfModel rank(world, layout, job);
    world.log().clear();
    rank.forward();
    const Counts forward = counts_on(world, "tp");
    world.log().clear();
    rank.backward();
    if (world.rank() == 0) passes = {forward, counts_on(world, "tp")};
  });
  return passes;
}

// Layers of experts after `dense` others, with or without shared experts and without a balance
// loss.
Job layers_of_experts(int64_t dense, int64_t shared_experts) {
  Job job = four_heads();
  job.config.num_hidden_layers = 3;
  job.config.first_k_dense_replace = dense;
  job.config.n_shared_experts = shared_experts;
  job.settings.sequence_balance_loss_coeff = 0;
  return job;
}

// The routed branch of a layer of experts, which records its counts and its z loss: no collective
// of any kind, in either pass. A layer with shared experts communicates over tp what a dense one
// does, which has the same edges.
TEST(TensorParallel, TheRoutedBranchDoesNotCommunicate) {
  for (const RankLayout& layout :
       {RankLayout{.tp = 2}, RankLayout{.ep = 2, .tp = 2}, RankLayout{.dp = 2, .ep = 4, .tp = 2}}) {
    SCOPED_TRACE(layout.text());
    const auto dense = passes_of(layout, layers_of_experts(3, 1));
    const auto shared = passes_of(layout, layers_of_experts(1, 1));
    const auto routed = passes_of(layout, layers_of_experts(1, 0));
    // Two MTP modules are there in any case.
    const int64_t layers = 2 + 2;
    for (const auto pass : {&Passes::forward, &Passes::backward}) {
      SCOPED_TRACE(pass == &Passes::forward ? "forward" : "backward");
      for (const auto& [kind, count] : routed.*pass) {
        const bool edge =
            kind == CollectiveKind::kAllGather || kind == CollectiveKind::kReduceScatter;
        EXPECT_EQ((shared.*pass).at(kind), (dense.*pass).at(kind)) << name_of(kind);
        EXPECT_EQ((shared.*pass).at(kind) - count, edge ? layers : 0) << name_of(kind);
      }
      EXPECT_EQ((routed.*pass).at(CollectiveKind::kAllToAll), 0);
    }
  }
}

// Its value is made of whole rows' counts: one sum in each layer of experts, forwards.
TEST(TensorParallel, ABalanceLossAddsUpItsCounts) {
  Job job = layers_of_experts(1, 1);
  const RankLayout layout = {.tp = 2};
  auto expected = passes_of(layout, job);
  expected.forward.at(CollectiveKind::kAllReduce) += 2 + 2;
  job.settings.sequence_balance_loss_coeff = 0.2;
  EXPECT_EQ(passes_of(layout, job), expected);
}

// One top-k for each token, on one rank of tp.
TEST(TensorParallel, EachTokenIsRoutedOnce) {
  const Job job = four_heads();
  const auto single = on_one_rank(job);
  for (const RankLayout& layout : {RankLayout{.tp = 2}, RankLayout{.cp = 2, .ep = 4, .tp = 2}}) {
    SCOPED_TRACE(layout.text());
    const auto on_many = on_ranks(layout, job);
    for (const auto& [layer, counts] : single.run.stats.expert_counts) {
      EXPECT_TRUE(at::equal(on_many.run.stats.expert_counts.at(layer), counts)) << layer;
    }
  }
}

// Gradients of weights that tp does not cut are terms. They are summed with those of the data
// parallel ranks: a collective for each unit, in fp32, whatever the model computes in.
TEST(TensorParallel, GradientsOfWholeWeightsAreSummedByUnitInFp32) {
  Job job = four_heads();
  job.settings.param_dtype = at::kFloat;
  job.settings.compute_dtype = at::kBFloat16;
  for (const RankLayout& layout :
       {RankLayout{.tp = 2, .fsdp = true}, RankLayout{.dp = 2, .tp = 2, .fsdp = true}}) {
    SCOPED_TRACE(layout.text());
    test::run_ranks(layout.ranks(), [&](dtensor::World& world) {
      RankOfModel rank(world, layout, job);
      rank.forward();
      world.log().clear();
      rank.backward();
      EXPECT_EQ(counts_on(world, "tp").at(CollectiveKind::kAllReduce), 0);
      // Four blocks (two of them MTP modules) and the last norm.
      EXPECT_EQ(counts_on(world, "tokens").at(CollectiveKind::kReduceScatter), 5);
      for (const auto& record : world.log().records()) {
        if (record.axis == "tokens" && record.kind == CollectiveKind::kReduceScatter) {
          EXPECT_EQ(record.dtype, "float32");
        }
      }
    });
  }
}

TEST(TensorParallel, UnderFsdp) {
  for (const bool recompute : {false, true}) {
    Job job = four_heads();
    job.settings.recompute.every = recompute ? 1 : 0;
    const Outcome expected = on_one_rank(job);
    for (RankLayout layout : kLayouts) {
      layout.fsdp = true;
      SCOPED_TRACE(layout.text());
      expect_same(on_ranks(layout, job), expected, 1e-11);
    }
  }
}

}  // namespace
}  // namespace longhaul::testing
