// Expert parallelism: experts on several ranks compute what they do on one.
#include "longhaul/parallel/expert.h"

#include <ATen/core/grad_mode.h>
#include <gmock/gmock.h>

#include "longhaul/dtensor/dtensor.h"
#include "tests/parallel/ranks_of_model.h"

namespace longhaul::testing {
namespace {

using dtensor::CollectiveKind;
using ::testing::HasSubstr;

const std::vector<RankLayout> kLayouts = {{.dp = 2, .ep = 2},          {.dp = 4, .ep = 2},
                                          {.dp = 4, .ep = 4},          {.dp = 2, .cp = 2, .ep = 2},
                                          {.dp = 2, .cp = 2, .ep = 4}, {.dp = 2, .cp = 4, .ep = 8},
                                          {.dp = 4, .cp = 2, .ep = 8}, {.cp = 4, .ep = 2}};

void expect_same_on_all_layouts(const Job& job) {
  const Outcome expected = on_one_rank(job);
  for (const auto& layout : kLayouts) {
    SCOPED_TRACE(layout.text());
    expect_same(on_ranks(layout, job), expected, 1e-11);
  }
}

TEST(ExpertParallel, EqualsOneRank) { expect_same_on_all_layouts({}); }

TEST(ExpertParallel, RecomputedBlocks) {
  Job job;
  job.settings.recompute.every = 1;
  expect_same_on_all_layouts(job);
}

TEST(ExpertParallel, FrozenTrunk) {
  Job job;
  job.settings.stage = v3::IndexerStage::kDenseWarmup;
  expect_same_on_all_layouts(job);
}

// Experts 2 and 3 take all tokens: most ranks compute nothing, and with 8 ranks two compute for
// all.
TEST(ExpertParallel, AllTokensToTwoExperts) {
  Job job;
  job.prepare = [](v3::Model& model) {
    const at::NoGradGuard no_grad;
    for (auto& [layer, router] : model.routers()) router->bias().narrow(0, 2, 2).fill_(100);
  };
  const auto counts = on_one_rank(job).run.stats.expert_counts.at(1);
  ASSERT_EQ(counts.sum().item<int64_t>(), counts.narrow(0, 2, 2).sum().item<int64_t>());
  expect_same_on_all_layouts(job);
}

TEST(ExpertParallel, OneChoiceOfOneExpert) {
  Job job;
  job.config.num_experts_per_tok = 1;
  job.prepare = [](v3::Model& model) {
    const at::NoGradGuard no_grad;
    for (auto& [layer, router] : model.routers()) router->bias()[7].fill_(100);
  };
  expect_same_on_all_layouts(job);
}

// Nothing to compute anywhere.
TEST(ExpertParallel, WithoutAnyToken) {
  Job job;
  job.rows.positions.fill_(-1);
  expect_same_on_all_layouts(job);
}

// The CPU kernels, also with no rows at all; fp32 sums in another order.
TEST(ExpertParallel, Kernels) {
  Job job;
  job.settings.param_dtype = job.settings.compute_dtype = at::kFloat;
  job.config.moe_intermediate_size = 32;  // widths that the kernels take
  job.config.hidden_size = 32;
  job.prepare = [](v3::Model& model) {
    for (const auto& slot : model.kernels()) *slot.kernel = ops::Kernel::kFused;
  };
  const Outcome expected = on_one_rank(job);
  for (const RankLayout& layout :
       {RankLayout{.dp = 4, .ep = 4}, RankLayout{.dp = 2, .cp = 4, .ep = 8}}) {
    SCOPED_TRACE(layout.text());
    expect_same(on_ranks(layout, job), expected, 2e-5);
  }
}

TEST(ExpertParallel, TwoRunsAreEqualBitByBit) {
  const Job job;
  const RankLayout layout = {.dp = 2, .cp = 2, .ep = 4};
  expect_same(on_ranks(layout, job), on_ranks(layout, job), 1e-300);
}

// Names and sizes stay those of the whole; a rank has the weights of its experts.
TEST(ExpertParallel, PartsOfTheWhole) {
  const Job job;
  const auto model_of_one = job.model();
  const auto whole = model_of_one->parameters();
  test::run_ranks(4, [&](dtensor::World& world) {
    const auto dims = parallel::ParallelDims::make(RankLayout{.dp = 4, .ep = 4}.config(), world);
    auto model = job.model();
    parallel::apply_expert_parallel(*model, dims.ep);
    const auto own = model->parameters();
    ASSERT_EQ(own.size(), whole.size());
    int64_t dealt = 0;
    for (size_t i = 0; i < own.size(); ++i) {
      EXPECT_EQ(own[i].name, whole[i].name);
      EXPECT_EQ(own[i].tensor->sizes(), whole[i].tensor->sizes()) << own[i].name;
      EXPECT_EQ(own[i].tensor->requires_grad(), whole[i].tensor->requires_grad());
      if (!v3::is_routed_expert(own[i].name)) continue;
      EXPECT_TRUE(at::equal(dtensor::local_of(*own[i].tensor),
                            whole[i].tensor->detach().narrow(0, 2 * world.rank(), 2)));
      ++dealt;
    }
    EXPECT_EQ(dealt, 9) << "three matrices in three layers";
  });
}

// With the rest of the weights cut, too: the experts of a layer over ep, and each over efsdp.
TEST(ExpertParallel, UnderFsdp) {
  for (const bool recompute : {false, true}) {
    Job job;
    job.settings.recompute.every = recompute ? 1 : 0;
    const Outcome expected = on_one_rank(job);
    for (RankLayout layout : kLayouts) {
      layout.fsdp = true;
      SCOPED_TRACE(layout.text());
      expect_same(on_ranks(layout, job), expected, 1e-11);
    }
  }
}

TEST(ExpertParallel, OverGloo) {
  const Job job;
  const test::RankOptions gloo = {.transport = test::Transport::kGloo};
  expect_same(on_ranks({.dp = 2, .cp = 2, .ep = 4, .fsdp = true}, job, gloo), on_one_rank(job),
              1e-11);
}

// Whatever the layout, an element of the initial weights is the same.
TEST(ExpertParallel, InitialWeightsByGlobalPosition) {
  const Job job;
  const auto whole = job.model();
  v3::initialize(*whole, 3, 0.02, true);
  test::run_ranks(4, [&](dtensor::World& world) {
    const RankLayout layout = {.dp = 4, .ep = 2};
    const auto dims = parallel::ParallelDims::make(layout.config(), world);
    auto on_meta = job.settings;
    on_meta.parameters_on_meta = true;
    v3::Model model(job.config, on_meta);
    parallel::apply_expert_parallel(model, dims.ep);
    const auto fsdp = parallel::apply_data_parallel(model, dims, layout.config());
    v3::initialize(model, 3, 0.02, true,
                   [&](const nn::NamedParameter& p) { return fsdp->part_of(p); });
    const auto own = model.parameters(), all = whole->parameters();
    for (size_t i = 0; i < own.size(); ++i) {
      const auto part = fsdp->part_of(own[i]);
      EXPECT_EQ(part.global_sizes, all[i].tensor->sizes()) << own[i].name;
      const auto expected =
          all[i].tensor->detach().narrow(0, part.offsets[0], own[i].tensor->size(0));
      EXPECT_TRUE(at::equal(own[i].tensor->detach(), expected)) << own[i].name;
      if (v3::is_routed_expert(own[i].name)) {
        EXPECT_EQ(own[i].tensor->size(0), 2) << "8 experts over 2 x 2 ranks";
      }
    }
  });
}

TEST(ExpertParallel, ExpertsThatCannotBeDealtOut) {
  const auto config = Job::dealt_config();
  EXPECT_NO_THROW(parallel::check_expert_parallel(config, 8));
  EXPECT_THAT(message_of([&] { parallel::check_expert_parallel(config, 3); }),
              HasSubstr("parallelism.expert_parallel_degree 3 does not divide the model's 8 routed "
                        "experts"));
}

// A layer sends its counts, its rows and the results; backward the gradients of both. What is sent
// depends on the routing, but all ranks together send each chosen row once in each direction.
TEST(ExpertParallel, WhatIsExchanged) {
  const Job job;
  const Outcome expected = on_one_rank(job);
  int64_t rows = 0;
  for (const auto& [layer, counts] : expected.run.stats.expert_counts) {
    rows += counts.sum().item<int64_t>();
  }
  const auto layers = static_cast<int64_t>(expected.run.stats.expert_counts.size());
  const int64_t row_bytes = job.config.hidden_size * 8;
  const int64_t count_bytes = job.config.n_routed_experts * 8;
  test::run_ranks(4, [&](dtensor::World& world) {
    RankOfModel rank(world, {.dp = 4, .ep = 4}, job);
    const auto expect = [&](int64_t count, int64_t bytes_of_all_ranks) {
      const auto total = world.log().total(CollectiveKind::kAllToAll, "ep");
      EXPECT_EQ(total.count, count);
      at::Tensor bytes = at::tensor({total.bytes});
      add_up(bytes, *rank.dims().all);
      EXPECT_EQ(bytes.item<int64_t>(), bytes_of_all_ranks);
    };
    world.log().clear();
    rank.forward();
    expect(3 * layers, 4 * layers * count_bytes + 2 * rows * row_bytes);
    world.log().clear();
    rank.backward();
    expect(2 * layers, 2 * rows * row_bytes);
  });
}

}  // namespace
}  // namespace longhaul::testing
