// Every layout trains the same model: the losses, every gradient by its global name, the gradients'
// norm and the updated weights of three steps are those of one rank. In fp64 only the order of sums
// differs: 1e-10 leaves room for AdamW, which divides gradients by their size.
#include <gmock/gmock.h>

#include <set>
#include <sstream>

#include "longhaul/checkpoint/checkpoint.h"
#include "tests/parallel/layout_lists.h"
#include "tests/support/log_capture.h"
#include "tests/support/temp_folder.h"

namespace longhaul::testing {
namespace {

// fp32: sums in another order, and weights moved by AdamW, which turns a small gradient's error
// into a share of the learning rate.
const Tolerances kFp32 = {.loss = 1e-5, .gradient = 1e-5, .weight = 1e-4, .gradient_steps = 1};

class Layouts : public ::testing::TestWithParam<Layout> {};

TEST_P(Layouts, TrainLikeOneRankInFp64) { expect_same(trained(GetParam(), {}), one_rank({})); }

const Overrides kInFp32 = {"--training.dtype", "float32"};

TEST_P(Layouts, TrainLikeOneRankInFp32) {
  expect_same(trained(GetParam(), kInFp32), one_rank(kInFp32), kFp32);
}

TEST_P(Layouts, TwoRunsAreBitEqual) {
  expect_identical(LayoutJob().run(GetParam(), kInFp32), trained(GetParam(), kInFp32));
}

// Of the layouts that run each time.
class ChosenLayouts : public Layouts {};

TEST_P(ChosenLayouts, TwoRunsInFp64AreBitEqual) {
  expect_identical(LayoutJob().run(GetParam()), trained(GetParam(), {}));
}

// What is measured of all tokens: the load of the experts exactly, the indexer's recall but for the
// order of sums.
class LayoutMeasures : public ::testing::TestWithParam<const char*> {};

TEST_P(LayoutMeasures, AreThoseOfOneRank) {
  const Overrides measured = {
      "--metrics.indexer_recall_freq", "1", "--metrics.log_freq", "1", "--dsa.stage", GetParam()};
  const auto& expected = one_rank(measured).metrics;
  for (const Layout layout : {Layout{.dp_shard = 3, .ep = 3}, Layout{.cp = 2}, Layout{.tp = 4},
                              Layout{.dp_replicate = 2, .tp = 2}, Layout{.cp = 2, .tp = 2}}) {
    const auto actual = LayoutJob().run(layout, measured).metrics;
    ASSERT_EQ(actual.size(), expected.size()) << layout.name();
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_EQ(actual[i]["expert_load"], expected[i]["expert_load"]) << layout.name();
      const auto& recall = expected[i]["indexer_recall_per_layer"];
      ASSERT_EQ(recall.size(), 4u) << "three layers and an MTP module";
      ASSERT_EQ(actual[i]["indexer_recall_per_layer"].size(), recall.size()) << layout.name();
      for (size_t layer = 0; layer < recall.size(); ++layer) {
        EXPECT_NEAR(actual[i]["indexer_recall_per_layer"][layer].get<double>(),
                    recall[layer].get<double>(), 1e-10)
            << layout.name() << " layer " << layer;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Stages, LayoutMeasures, ::testing::Values("sparse", "dense_warmup"),
                         [](const auto& info) { return std::string(info.param); });

// Every axis and every kind of combination, for each time the suite runs; all of the lists above
// are the test parallel_every_layout (label slow).
const std::vector<Layout> kChosen = {
    {.dp_replicate = 2},
    {.dp_shard = 3},
    {.cp = 2},
    {.tp = 4},
    {.dp_replicate = 2, .dp_shard = 2},
    {.dp_shard = 3, .ep = 3},
    {.cp = 2, .tp = 2},
    {.tp = 4, .ep = 2},
    {.dp_shard = 2, .cp = 2, .ep = 4},
    {.dp_shard = 2, .tp = 2, .ep = 4},
    {.dp_replicate = 2, .dp_shard = 2, .cp = 2, .ep = 2},
    {.dp_shard = 2, .cp = 2, .tp = 2, .ep = 2},
};

INSTANTIATE_TEST_SUITE_P(Chosen, Layouts, ::testing::ValuesIn(kChosen),
                         [](const auto& info) { return info.param.name(); });

INSTANTIATE_TEST_SUITE_P(Chosen, ChosenLayouts, ::testing::ValuesIn(kChosen),
                         [](const auto& info) { return info.param.name(); });

INSTANTIATE_TEST_SUITE_P(DataParallel, Layouts, ::testing::ValuesIn(kDataParallel),
                         [](const auto& info) { return info.param.name(); });

INSTANTIATE_TEST_SUITE_P(ContextAndExperts, Layouts, ::testing::ValuesIn(kContextAndExperts),
                         [](const auto& info) { return info.param.name(); });

INSTANTIATE_TEST_SUITE_P(Tensor, Layouts, ::testing::ValuesIn(kTensor),
                         [](const auto& info) { return info.param.name(); });

TEST(LayoutLists, HaveAtLeastFiftyAndTheChosenAmongThem) {
  std::set<std::string> names;
  for (const auto* list : {&kDataParallel, &kContextAndExperts, &kTensor}) {
    for (const auto& layout : *list) names.insert(layout.name());
  }
  EXPECT_GE(names.size(), 50u);
  for (const auto& layout : kChosen) EXPECT_EQ(names.count(layout.name()), 1u) << layout.name();
}

struct Variant {
  std::string name;
  Overrides overrides;
};

void PrintTo(const Variant& variant, std::ostream* out) { *out << variant.name; }

const std::vector<Variant> kVariants = {
    {"never_reshard", {"--parallelism.fsdp_reshard_after_forward", "never"}},
    {"always_reshard", {"--parallelism.fsdp_reshard_after_forward", "always"}},
    {"recompute", {"--activation_checkpoint.mode", "full"}},
    {"recompute_never_reshard",
     {"--activation_checkpoint.mode", "full", "--parallelism.fsdp_reshard_after_forward", "never"}},
    {"recompute_always_reshard",
     {"--activation_checkpoint.mode", "full", "--parallelism.fsdp_reshard_after_forward",
      "always"}},
    {"own_norm_always_reshard",
     {"--mtp.own_norm", "true", "--parallelism.fsdp_reshard_after_forward", "always"}},
    {"recompute_nothing", {"--activation_checkpoint.mode", "none"}},
    {"recompute_by_operator", {"--activation_checkpoint.selective_ac_option", "op"}},
    {"frozen_trunk", {"--dsa.stage", "dense_warmup"}},
    {"frozen_trunk_recompute",
     {"--dsa.stage", "dense_warmup", "--activation_checkpoint.mode", "full"}},
    {"no_indexer", {"--dsa.stage", "off"}},
    {"indexer_coefficient_0", {"--dsa.indexer_loss_coeff", "0"}},
    {"mtp_weight_0", {"--mtp.loss_weight", "0"}},
    {"all_coefficients_0",
     {"--dsa.indexer_loss_coeff", "0", "--moe.sequence_balance_loss_coeff", "0",
      "--moe.z_loss_coeff", "0"}},
    {"mtp_own_norm_after_norm", {"--mtp.own_norm", "true", "--mtp.hidden", "after_norm"}},
    {"two_mtp_modules", {"--mtp.num_modules", "2"}},
    {"no_mtp", {"--mtp.num_modules", "0"}},
    {"expanded", {"--model.mla_form", "expanded"}},
    {"consecutive_slots", {"--parallelism.context_parallel_load_balancer", "none"}},
    {"norm_inf", {"--training.norm_type", "inf", "--training.max_norm", "0.01"}},
    {"norm_3", {"--training.norm_type", "3", "--training.max_norm", "0.01"}},
};

class Variants : public ::testing::TestWithParam<Variant> {};

TEST_P(Variants, TrainLikeOneRank) {
  const auto& expected = one_rank(GetParam().overrides);
  for (const Layout& layout : {Layout{.dp_shard = 4}, Layout{.dp_replicate = 2, .dp_shard = 2},
                               Layout{.dp_shard = 2, .cp = 2, .ep = 2}, Layout{.tp = 2},
                               Layout{.cp = 2, .tp = 2, .ep = 2}}) {
    SCOPED_TRACE(layout.name());
    expect_same(LayoutJob().run(layout, GetParam().overrides), expected);
  }
}

INSTANTIATE_TEST_SUITE_P(All, Variants, ::testing::ValuesIn(kVariants),
                         [](const auto& info) { return info.param.name; });

void expect_like_one_rank(int64_t seq_len, const std::vector<Layout>& layouts,
                          const Overrides& overrides = {}) {
  const LayoutJob job(layout_model(), seq_len);
  const auto expected = job.run({}, overrides);
  for (const Layout& layout : layouts) {
    SCOPED_TRACE(fmt::format("{} slots on {}", seq_len, layout.name()));
    expect_same(job.run(layout, overrides), expected);
  }
}

// The ranks of tp have slices of unequal lengths, of whole sequences and of cp's slices of them.
TEST(LayoutRuns, SequencesThatTensorParallelismDoesNotDivide) {
  expect_like_one_rank(15, {{.tp = 2}, {.tp = 4}, {.dp_shard = 2, .tp = 2, .ep = 4}});
  expect_like_one_rank(14, {{.cp = 2, .tp = 2}, {.cp = 2, .tp = 2, .ep = 4}},
                       {"--parallelism.context_parallel_load_balancer", "none"});
}

TEST(LayoutRuns, ARankOfTensorParallelismWithoutASlot) {
  expect_like_one_rank(5, {{.tp = 4}, {.tp = 4, .ep = 2}});
}

// Where more ranks cut the heads: the dense warm-up deals the indexer's loss out in slices.
TEST(LayoutRuns, TheIndexerUnderTensorParallelism) {
  for (const Overrides& overrides :
       {Overrides{"--dsa.stage", "dense_warmup"}, Overrides{"--dsa.hadamard", "true"}}) {
    for (const Layout& layout : {Layout{.tp = 4}, Layout{.dp_shard = 2, .tp = 2, .ep = 2}}) {
      SCOPED_TRACE(fmt::format("{} on {}", fmt::join(overrides, " "), layout.name()));
      expect_same(LayoutJob().run(layout, overrides), one_rank(overrides));
    }
  }
}

// One expert for each rank.
TEST(EveryLayout, AsManyExpertsAsRanks) {
  auto model = layout_model();
  model.n_routed_experts = 8;
  model.n_group = 4;
  const LayoutJob job(model);
  const auto expected = job.run({});
  for (const Layout& layout :
       {Layout{.dp_shard = 8, .ep = 8}, Layout{.dp_shard = 2, .cp = 2, .tp = 2, .ep = 8}}) {
    SCOPED_TRACE(layout.name());
    expect_same(job.run(layout), expected);
  }
}

// Over sockets, as processes would; the second time with the same bits.
TEST(LayoutRuns, TrainLikeOneRankThroughGloo) {
  const LayoutJob job;
  for (const Layout& layout :
       {Layout{.dp_replicate = 2, .dp_shard = 2}, Layout{.dp_shard = 2, .cp = 2, .ep = 4}}) {
    SCOPED_TRACE(layout.name());
    const auto run = [&](const std::string& name) {
      job.train(layout, name, {}, {.transport = test::Transport::kGloo});
      return job.result(name);
    };
    const auto first = run(layout.name());
    expect_same(first, one_rank({}));
    expect_identical(run(layout.name() + "_again"), first);
  }
}

// The harness itself: another seed is found in every kind of number.
TEST(LayoutRuns, ADifferenceIsFound) {
  const auto other = LayoutJob().run({.dp_shard = 2}, {"--debug.seed", "1"});
  const auto& expected = one_rank({});
  EXPECT_GT(relative(other.steps[0].at("loss"), expected.steps[0].at("loss")), 1e-6);
  EXPECT_GT(relative(other.steps[0].at("grad_norm"), expected.steps[0].at("grad_norm")), 1e-6);
  EXPECT_GT(relative_to_max(other.steps[0].at("grad.lm_head.weight"),
                            expected.steps[0].at("grad.lm_head.weight")),
            1e-6);
}

// bf16 on the ranks is bf16 on one rank: the same casts in the same places, so the first step's
// losses agree to the last bits of fp32 sums. A gradient that several uses of a weight add up to is
// rounded to bf16 once more.
TEST(LayoutRuns, MixedPrecisionCastsWhereOneRankDoes) {
  const Overrides bf16 = {"--training.dtype", "float32", "--training.mixed_precision_param",
                          "bfloat16"};
  const auto& expected = one_rank(bf16);
  const auto actual = LayoutJob().run({.dp_replicate = 2, .dp_shard = 2}, bf16);
  for (const char* name : {"loss", "lm_loss", "mtp_loss", "indexer_loss_per_layer"}) {
    EXPECT_LE(relative(actual.steps[0].at(name), expected.steps[0].at(name)), 1e-6) << name;
  }
  for (const auto& [name, value] : expected.steps[0]) {
    if (!name.starts_with("grad.")) continue;
    EXPECT_LE(relative_to_max(actual.steps[0].at(name), value), 0.01) << name;
  }
}

// A kernel that a layout has no use for is not in the table.
TEST(LayoutRuns, TheStartupTableListsTheKernelsThatRun) {
  const auto table = [](const Layout& layout) {
    const test::LogCapture log;
    LayoutJob().run(layout, {"--training.dtype", "float32", "--training.steps", "1",
                             "--model.converters", "rms_norm,cross_entropy"});
    return log.text();
  };
  EXPECT_THAT(table({.dp_shard = 2}),
              ::testing::ContainsRegex("converters +cross_entropy \\([0-9]+ modules\\), rms_norm"));
  EXPECT_THAT(table({.tp = 2}), ::testing::ContainsRegex("converters +rms_norm"));
}

// A checkpoint of any layout goes on in any other.
TEST(LayoutRuns, ACheckpointGoesOnInAnotherLayout) {
  const LayoutJob job;
  const auto overrides = [](int64_t steps) {
    return Overrides{
        "--checkpoint.enable", "--checkpoint.last_save_model_only", "false", "--training.steps",
        std::to_string(steps), "--lr_scheduler.min_lr_factor",      "1"};
  };
  const auto& expected = one_rank({"--lr_scheduler.min_lr_factor", "1"});
  const std::vector<Layout> layouts = {
      {.dp_shard = 2, .cp = 2, .ep = 4}, {}, {.dp_replicate = 2, .tp = 2, .ep = 2}};
  for (int64_t step = 1; step <= kLayoutSteps; ++step) {
    EXPECT_EQ(job.train(layouts[static_cast<size_t>(step - 1)], "run", overrides(step)),
              train::Outcome::kFinished);
  }
  expect_same(job.result("run"), expected);
  // The last one as it lies on disk, against one that one rank has written.
  const LayoutJob alone;
  alone.train({}, "run", overrides(kLayoutSteps));
  const auto ours = checkpoint::load(job.folder() / "run/checkpoint/step-3");
  const auto theirs = checkpoint::load(alone.folder() / "run/checkpoint/step-3");
  ASSERT_EQ(ours.tensors.size(), theirs.tensors.size());
  for (const auto& [name, value] : theirs.tensors) {
    EXPECT_LE(relative(ours.tensors.at(name), value), 1e-10) << name;
  }
  EXPECT_EQ(ours.trainer.at("rows"), theirs.trainer.at("rows"));
  EXPECT_EQ(job.train(layouts[0], "run", overrides(3)), train::Outcome::kAlreadyDone);
}

// Each rank reads its part of a folder with one tensor for each expert.
TEST(LayoutRuns, StartsFromAHuggingFaceFolder) {
  const GoldenJob job("hf_base", load_golden("hf_base/train20.safetensors").at("batches"));
  const auto first_step = [&](const Layout& layout) {
    const JobConfig config = job.config({"--training.dtype",
                                         "float64",
                                         "--training.steps",
                                         "1",
                                         "--debug.dump_steps",
                                         "1",
                                         "--training.local_batch_size",
                                         "1",
                                         "--training.global_batch_size",
                                         "5",
                                         "--parallelism.data_parallel_shard_degree",
                                         std::to_string(layout.dp_shard),
                                         "--parallelism.context_parallel_degree",
                                         std::to_string(layout.cp),
                                         "--parallelism.expert_parallel_degree",
                                         std::to_string(layout.ep),
                                         "--parallelism.tensor_parallel_degree",
                                         std::to_string(layout.tp),
                                         "--job.dump_folder",
                                         (job.folder.path() / layout.name()).string()});
    const std::atomic<bool> stop{false};
    test::run_ranks(layout.ranks(), [&](auto& world) { train::run_training(config, stop, world); });
    return checkpoint::load_safetensors(job.folder.path() / layout.name() /
                                        "dump/step-1.safetensors");
  };
  const auto alone = first_step({});
  expect_same_step(first_step({.dp_shard = 5}), alone, 1, {});
  expect_same_step(first_step({.cp = 4, .ep = 2}), alone, 1, {});
  expect_same_step(first_step({.cp = 2, .tp = 2, .ep = 2}), alone, 1, {});
}

// 144 rows in batches of 5: the last ones are padding, and on 4 ranks some ranks have nothing else.
TEST(LayoutRuns, ValidationReadsEachRowOnce) {
  const LayoutJob job;
  const Overrides overrides = {"--validation.enable",
                               "--validation.dataset",
                               "tokenized",
                               "--validation.dataset_path",
                               (job.folder() / "rows.jsonl").string(),
                               "--validation.seq_len",
                               std::to_string(kLayoutSeqLen),
                               "--validation.local_batch_size",
                               "5",
                               "--validation.freq",
                               "1"};
  const auto expected = job.run({}, overrides);
  ASSERT_EQ(expected.metrics.size(), 3u);
  for (const Layout& layout : {Layout{.dp_shard = 4}, Layout{.dp_shard = 2, .cp = 2, .ep = 2},
                               Layout{.dp_replicate = 2, .tp = 2, .ep = 2}}) {
    SCOPED_TRACE(layout.name());
    const auto actual = job.run(layout, overrides);
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_NEAR(actual.metrics[i]["validation_loss"].get<double>() /
                      expected.metrics[i]["validation_loss"].get<double>(),
                  1, 1e-10);
    }
    expect_same(actual, expected);
  }
}

// Ranks that see data of their own, such as folders of different nodes, end together, too.
TEST(LayoutRuns, TheRankWithTheLeastDataEndsTheRun) {
  const LayoutJob job;
  std::istringstream rows(test::slurp(job.folder() / "rows.jsonl"));
  std::string fewer, line;
  for (int i = 0; i < 2 * kRowsOfAStep && std::getline(rows, line); ++i) fewer += line + "\n";
  write_text(job.folder() / "fewer.jsonl", fewer);
  const Overrides once = {"--training.repeat", "false", "--training.steps", "50"};
  auto short_data = once;
  short_data.insert(short_data.end(),
                    {"--training.dataset_path", (job.folder() / "fewer.jsonl").string()});
  const Layout layout{.dp_shard = 3};
  const JobConfig plenty = job.config(layout, "run", once);
  const JobConfig little = job.config(layout, "run", short_data);
  const std::atomic<bool> stop{false};
  std::atomic<int> finished{0};
  test::run_ranks(3, [&](dtensor::World& world) {
    const auto outcome = train::run_training(world.rank() == 1 ? little : plenty, stop, world);
    finished += outcome == train::Outcome::kFinished;
  });
  EXPECT_EQ(finished, 3);
  EXPECT_EQ(job.result("run").metrics.size(), 2u);
}

// What cannot be dealt out is an error of the job, on all ranks.
TEST(LayoutRuns, SequencesAndExpertsThatCannotBeDealtOut) {
  const LayoutJob job;
  const auto error = [&](const Layout& layout, const Overrides& overrides) {
    return message_of([&] { job.run(layout, overrides); });
  };
  EXPECT_THAT(error({.cp = 2}, {"--training.seq_len", "14"}),
              ::testing::HasSubstr("training.seq_len: 14 slots cannot be dealt to 2 ranks"));
  EXPECT_THAT(error({.dp_shard = 8, .ep = 8}, {}),
              ::testing::HasSubstr("expert_parallel_degree 8 does not divide the model's 12"));
}

// A weight that is not finite lies on one rank only; all of them must stop, with the same error.
TEST(LayoutRuns, AllRanksStopWhenOneHoldsWhatIsNotFinite) {
  const LayoutJob job;
  const Overrides overrides = {"--checkpoint.enable", "--checkpoint.last_save_model_only", "false"};
  job.train({}, "run", [&] {
    auto one_step = overrides;
    one_step.insert(one_step.end(), {"--training.steps", "1"});
    return one_step;
  }());
  const auto step_folder = job.folder() / "run/checkpoint/step-1";
  auto snapshot = checkpoint::load(step_folder);
  snapshot.tensors.at("model.embed_tokens.weight")[22].fill_(NAN);
  fs::remove_all(step_folder);
  checkpoint::save(job.folder() / "run/checkpoint", snapshot);
  std::mutex mutex;
  std::vector<std::string> errors;
  const JobConfig config = job.config({.dp_shard = 4}, "run", overrides);
  const std::atomic<bool> stop{false};
  test::run_ranks(4, [&](dtensor::World& world) {
    try {
      train::run_training(config, stop, world);
    } catch (const UserError& error) {
      const std::lock_guard lock(mutex);
      errors.emplace_back(error.what());
    }
  });
  ASSERT_EQ(errors.size(), 4u);
  for (const auto& error : errors) {
    EXPECT_EQ(error, errors[0]);
    EXPECT_NE(error.find("model.embed_tokens.weight holds values that are not finite"),
              std::string::npos)
        << error;
  }
}

}  // namespace
}  // namespace longhaul::testing
