// Context parallelism: which slots a rank takes, and that ranks which share sequences compute what
// one rank does.
#include "longhaul/parallel/context.h"

#include <gmock/gmock.h>
#include <torch/csrc/autograd/autograd.h>

#include "longhaul/config/load.h"
#include "tests/parallel/ranks_of_model.h"

namespace longhaul::testing {
namespace {

using dtensor::CollectiveKind;
using parallel::DsaContextParallel;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr SequenceSplit kSplits[] = {SequenceSplit::kContiguous, SequenceSplit::kHeadTail};

// f(cp rank, its context parallelism) on `ranks` ranks.
void on_context_ranks(int ranks, SequenceSplit split,
                      const std::function<void(int, const DsaContextParallel&)>& f) {
  test::run_ranks(ranks, [&](dtensor::World& world) {
    const auto dims = parallel::ParallelDims::make(RankLayout{.cp = ranks}.config(), world);
    f(world.rank(), DsaContextParallel({.group = dims.mesh->shared_axis("cp"), .split = split}));
  });
}

// The positions of a rank's slots.
std::vector<int64_t> slots_of(int64_t seq_len, int64_t ranks, SequenceSplit split, int64_t rank) {
  std::vector<int64_t> positions;
  for (const auto& run : parallel::slice_of_rank(seq_len, ranks, split, rank)) {
    EXPECT_EQ(run.slot, static_cast<int64_t>(positions.size()));
    for (int64_t i = 0; i < run.count; ++i) positions.push_back(run.position + i);
  }
  return positions;
}

TEST(SequenceSplits, SlotsOfEachRank) {
  EXPECT_THAT(slots_of(8, 2, SequenceSplit::kContiguous, 0), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(slots_of(8, 2, SequenceSplit::kContiguous, 1), ElementsAre(4, 5, 6, 7));
  EXPECT_THAT(slots_of(8, 2, SequenceSplit::kHeadTail, 0), ElementsAre(0, 1, 6, 7));
  EXPECT_THAT(slots_of(8, 2, SequenceSplit::kHeadTail, 1), ElementsAre(2, 3, 4, 5));
  EXPECT_THAT(slots_of(6, 3, SequenceSplit::kHeadTail, 1), ElementsAre(1, 4));
}

// Tokens A0 A1 A2 B0 B1 B2 B3 and padding: the shift precedes the cut and stops at document edges.
TEST(SequenceSplits, MtpShiftsPrecedeTheCut) {
  const int64_t A = 10, B = 20, S = 8, none = -100;
  const auto ids =
      at::tensor({A, A + 1, A + 2, B, B + 1, B + 2, B + 3, int64_t{0}, int64_t{0}, int64_t{0}})
          .unsqueeze(0);
  const auto labels =
      at::tensor({A + 1, A + 2, none, B + 1, B + 2, B + 3, none, none, none, none}).unsqueeze(0);
  const auto positions = at::tensor({0, 1, 2, 0, 1, 2, 3, -1, -1, -1}, at::kLong).unsqueeze(0);
  const auto whole = v3::prepare_batch(ids, labels, positions, S);
  const std::vector<std::vector<int64_t>> inputs = {
      {A, A + 1, A + 2, B, B + 1, B + 2, B + 3, 0},  // of the trunk
      {A + 1, A + 2, 0, B + 1, B + 2, B + 3, 0, 0},  // shifted by 1
      {A + 2, 0, 0, B + 2, B + 3, 0, 0, 0}};
  const std::vector<std::vector<int64_t>> wanted = {
      {A + 1, A + 2, none, B + 1, B + 2, B + 3, none, none},
      {A + 2, none, none, B + 2, B + 3, none, none, none},
      {none, none, none, B + 3, none, none, none, none}};
  const std::vector<int64_t> starts = {0, 0, 0, 3, 3, 3, 3, 8};
  for (const auto split : kSplits) {
    on_context_ranks(2, split, [&](int rank, const auto& context) {
      const auto slice = context.cut(whole);
      const auto positions_of_rank = slots_of(S, 2, split, rank);
      ASSERT_EQ(slice.towers.size(), 3U);
      for (size_t tower = 0; tower < 3; ++tower) {
        const auto& slots = slice.towers[tower];
        int64_t tokens = 0, targets = 0;
        for (int64_t i = 0; i < S / 2; ++i) {
          const auto t = positions_of_rank[static_cast<size_t>(i)];
          EXPECT_EQ(slots.input_ids[0][i].template item<int64_t>(), inputs[tower][t]);
          EXPECT_EQ(slots.labels[0][i].template item<int64_t>(), wanted[tower][t]);
          EXPECT_EQ(slots.last_key[0][i].template item<int64_t>(), t);
          const bool valid = inputs[tower][t] != 0;
          EXPECT_EQ(slots.valid[0][i].template item<bool>(), valid);
          EXPECT_EQ(slots.doc_start[0][i].template item<int64_t>(), valid ? starts[t] : t + 1);
          tokens += valid;
          targets += wanted[tower][t] != none;
        }
        EXPECT_EQ(slots.num_tokens, tokens);
        EXPECT_EQ(slots.num_labels, targets);
      }
    });
  }
}

TEST(SequenceSplits, RowsComeTogetherInOrderAndTheirGradientsAddUp) {
  const int64_t B = 2, S = 24, D = 3;
  const auto whole = normal({B, S, D}, 1);
  for (const int ranks : {2, 3, 4}) {
    for (const auto split : kSplits) {
      on_context_ranks(ranks, split, [&](int rank, const auto& context) {
        const auto positions = at::tensor(slots_of(S, ranks, split, rank));
        const auto cut = context.cut(plain_batch(at::zeros({B, S}, at::kLong))).cut;
        const auto own = whole.index_select(1, positions).set_requires_grad(true);
        const auto all = cut->gather(own);
        EXPECT_TRUE(at::equal(all.detach(), whole));
        const auto weight = normal({B, S, D}, 2);
        const auto grad = torch::autograd::grad({(all * weight * (rank + 1)).sum()}, {own})[0];
        const auto expected = weight.index_select(1, positions) * ranks * (ranks + 1) / 2;
        EXPECT_LT(max_difference(grad, expected), 1e-13);
        EXPECT_EQ(cut->sum(at::tensor({rank})).template item<int64_t>(), ranks * (ranks - 1) / 2);
      });
    }
  }
}

TEST(SequenceSplits, SequencesThatCannotBeDealtOut) {
  EXPECT_NO_THROW(parallel::check_sequence_split(12, 3, SequenceSplit::kHeadTail));
  EXPECT_THAT(message_of([] { parallel::check_sequence_split(9, 3, SequenceSplit::kHeadTail); }),
              HasSubstr("9 slots cannot be dealt to 3 ranks in 6 chunks (one from the head and one "
                        "from the tail each); make it a multiple of 6"));
  EXPECT_NO_THROW(parallel::check_sequence_split(9, 3, SequenceSplit::kContiguous));
  EXPECT_THAT(message_of([] { parallel::check_sequence_split(0, 2, SequenceSplit::kContiguous); }),
              HasSubstr("0 slots cannot be dealt to 2 ranks in 2 chunks; make it a multiple of 2"));
}

// What a job file may say.
std::string job_error(const std::string& text) {
  return message_of([&] {
    parallel::check_context_parallel(parse_job("[parallelism]\n" + text, "job.toml", {}), 2);
  });
}

TEST(ContextParallelOfAJob, KindsByName) {
  EXPECT_EQ(job_error(""), "");
  EXPECT_EQ(job_error("enable_custom_context_parallel = true"), "");
  EXPECT_EQ(job_error("enable_custom_context_parallel = true\ncustom_context_parallel_path = "
                      "\"torchtitan_npu.distributed.context_parallel.dsa_cp."
                      "AscendDSAContextParallelContext\""),
            "");
  const auto unknown =
      job_error("enable_custom_context_parallel = true\ncustom_context_parallel_path = \"my.dsb\"");
  EXPECT_THAT(unknown, HasSubstr("job.toml:3: parallelism.custom_context_parallel_path"));
  EXPECT_THAT(unknown, HasSubstr("unknown context parallelism 'my.dsb', did you mean 'dsa'?"));
  EXPECT_EQ(job_error("custom_context_parallel_path = \"my.dsb\""), "") << "it is not enabled";
  EXPECT_THAT(job_error("context_parallel_rotate_method = \"alltoall\""),
              HasSubstr("set it to \"allgather\""));
  EXPECT_THAT(job_error("[training]\nseq_len = 6"),
              HasSubstr("training.seq_len: 6 slots cannot be dealt to 2 ranks in 4 chunks"));
  EXPECT_THAT(job_error("[validation]\nenable = true\nseq_len = 10"),
              HasSubstr("validation.seq_len: 10 slots cannot be dealt to 2 ranks in 4 chunks"));
}

TEST(ContextParallelOfAJob, AnotherKindAndAnotherSplit) {
  test::run_ranks(2, [](dtensor::World& world) {
    const auto dims = parallel::ParallelDims::make(RankLayout{.cp = 2}.config(), world);
    std::optional<parallel::ContextOptions> asked;
    const parallel::ContextParallelKinds kinds = {
        {"dsb", [&](const parallel::ContextOptions& options) {
           asked = options;
           return std::make_unique<DsaContextParallel>(options);
         }}};
    const auto job = parse_job(
        "[training]\nseq_len = 6\n[parallelism]\nenable_custom_context_parallel = true\n"
        "custom_context_parallel_path = \"my.dsb\"\ncontext_parallel_load_balancer = \"none\"",
        "job.toml", {});
    const auto context =
        parallel::make_context_parallel(job, dims.mesh->shared_axis("cp"), at::kCPU, kinds);
    ASSERT_TRUE(asked.has_value());
    EXPECT_EQ(asked->split, SequenceSplit::kContiguous);
    EXPECT_EQ(context->cut(plain_batch(at::zeros({1, 6}, at::kLong))).towers[0].valid.size(1), 3);
    EXPECT_EQ(parallel::make_context_parallel(job, dims.mesh->shared_axis("tp"), at::kCPU), nullptr)
        << "one rank";
  });
}

class ContextParallelModel
    : public ::testing::TestWithParam<std::tuple<v3::IndexerStage, v3::MlaForm, int64_t>> {};

// Sparse, dense warm-up and off; keys absorbed and expanded; activations kept and computed again.
TEST_P(ContextParallelModel, EqualsOneRank) {
  Job job;
  std::tie(job.settings.stage, job.settings.mla_form, job.settings.recompute.every) = GetParam();
  const Outcome expected = on_one_rank(job);
  for (const auto split : kSplits) {
    for (const auto& [dp, cp] : {std::pair{1, 2}, {1, 4}, {2, 2}}) {
      const RankLayout layout = {.dp = dp, .cp = cp, .split = split};
      SCOPED_TRACE(layout.text());
      expect_same(on_ranks(layout, job), expected, 1e-11);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Stages, ContextParallelModel,
    ::testing::Combine(::testing::Values(v3::IndexerStage::kSparse, v3::IndexerStage::kDenseWarmup,
                                         v3::IndexerStage::kOff),
                       ::testing::Values(v3::MlaForm::kAbsorbed, v3::MlaForm::kExpanded),
                       ::testing::Values(int64_t{0}, int64_t{1})));

// With the weights cut over the same ranks.
TEST(ContextParallelModel, UnderFsdp) {
  for (const auto stage : {v3::IndexerStage::kSparse, v3::IndexerStage::kDenseWarmup}) {
    for (const bool recompute : {false, true}) {
      Job job;
      job.settings.stage = stage;
      job.settings.recompute.every = recompute ? 1 : 0;
      const Outcome expected = on_one_rank(job);
      for (const auto& [dp, cp] : {std::pair{1, 4}, {2, 2}}) {
        const RankLayout layout = {.dp = dp, .cp = cp, .fsdp = true};
        SCOPED_TRACE(layout.text());
        expect_same(on_ranks(layout, job), expected, 1e-11);
      }
    }
  }
}

// The CPU kernels; fp32 sums in another order.
TEST(ContextParallelKernels, EqualOneRank) {
  for (const auto stage : {v3::IndexerStage::kSparse, v3::IndexerStage::kDenseWarmup}) {
    Job job;
    job.settings.stage = stage;
    job.settings.param_dtype = job.settings.compute_dtype = at::kFloat;
    job.prepare = [](v3::Model& model) {
      for (const auto& slot : model.kernels()) *slot.kernel = ops::Kernel::kFused;
    };
    const Outcome expected = on_one_rank(job);
    for (const auto split : kSplits) {
      expect_same(on_ranks({.cp = 2, .split = split}, job), expected, 2e-5);
    }
  }
}

// bf16 rounds in other places, by 2^-9 of each value at a time, and may select and route
// differently; what must hold is that no term is missing.
TEST(ContextParallelKernels, Bfloat16) {
  Job job;
  job.settings.param_dtype = at::kFloat;
  job.settings.compute_dtype = at::kBFloat16;
  job.prepare = [](v3::Model& model) {
    for (const auto& slot : model.kernels()) *slot.kernel = ops::Kernel::kFused;
  };
  const Outcome expected = on_one_rank(job), actual = on_ranks({.cp = 2}, job);
  EXPECT_NEAR(actual.run.total / expected.run.total, 1, 2e-2);
  EXPECT_THAT(differing(actual.run.gradients, expected.run.gradients, 0.5), ::testing::IsEmpty());
}

TEST(ContextParallelModel, OverGloo) {
  const Job job;
  const test::RankOptions gloo = {.transport = test::Transport::kGloo};
  expect_same(on_ranks({.dp = 2, .cp = 2, .fsdp = true}, job, gloo), on_one_rank(job), 1e-11);
}

// Without auxiliary losses the same parameters have gradients on every layout.
TEST(ContextParallelModel, CoefficientsOfZero) {
  Job job;
  job.settings = fp64_settings();
  job.settings.indexer_loss_coeff = 0;
  expect_same(on_ranks({.cp = 4}, job), on_one_rank(job), 1e-11);
}

// Each layer gathers its latents with the rope keys and its index keys once, and sends back their
// gradients once; the mixture-of-experts layers add up their counts for the balance loss.
TEST(ContextParallelModel, WhatIsExchanged) {
  const Job job;
  const int64_t layers = job.config.num_hidden_layers + job.config.num_nextn_predict_layers;
  const int64_t moe_layers = layers - job.config.first_k_dense_replace;
  const int64_t width =
      job.config.kv_lora_rank + job.config.qk_rope_head_dim + job.config.index_head_dim;
  const int64_t B = 4, own = B * kSlots / 2 * width * 8;  // bytes
  test::run_ranks(2, [&](dtensor::World& world) {
    RankOfModel rank(world, {.cp = 2}, job);
    const auto expect = [&](CollectiveKind kind, int64_t count, int64_t bytes) {
      const auto total = world.log().total(kind, "cp");
      EXPECT_EQ(total.count, count) << dtensor::name_of(kind);
      EXPECT_EQ(total.bytes, bytes) << dtensor::name_of(kind);
    };
    world.log().clear();
    rank.forward();
    expect(CollectiveKind::kAllGather, 2 * layers, layers * own);
    expect(CollectiveKind::kAllReduce, moe_layers,
           moe_layers * B * (job.config.n_routed_experts + 1) * 8);
    expect(CollectiveKind::kReduceScatter, 0, 0);
    world.log().clear();
    rank.backward();
    expect(CollectiveKind::kReduceScatter, 2 * layers, layers * own * 2);
    expect(CollectiveKind::kAllGather, 0, 0);
    expect(CollectiveKind::kAllReduce, 0, 0);
  });
}

}  // namespace
}  // namespace longhaul::testing
