// What any layout has saved, any other takes up: weights, moments, router biases, tokens seen and
// the data position are the same bits by global name, and the run goes on as if it had not stopped.
#include <gmock/gmock.h>

#include "longhaul/checkpoint/checkpoint_reader.h"
#include "longhaul/train/resolve_model.h"
#include "longhaul/train/trainer.h"
#include "tests/parallel/layout_harness.h"

namespace longhaul::testing {
namespace {

// Every axis, and numbers that do not divide: a vocabulary of 23 on 2, 3 and 8 ranks, 12 experts on
// 3 and 4, 12 columns on 8.
const std::vector<Layout> kLayouts = {{},
                                      {.dp_replicate = 2},
                                      {.dp_shard = 8},
                                      {.dp_shard = 3, .ep = 3},
                                      {.dp_replicate = 2, .dp_shard = 3},
                                      {.dp_shard = 2, .tp = 2},
                                      {.dp_shard = 2, .cp = 2, .ep = 4},
                                      {.dp_replicate = 2, .cp = 2, .tp = 2, .ep = 2}};

Overrides until(int64_t step) {
  return {"--checkpoint.enable", "--checkpoint.last_save_model_only", "false", "--training.steps",
          std::to_string(step),  "--lr_scheduler.min_lr_factor",      "1"};
}

// Jobs of which a run named after each layout has gone to step 2 there.
const LayoutJob& saved_by(const Layout& layout) {
  static std::map<std::string, std::unique_ptr<LayoutJob>> jobs;
  auto& job = jobs[layout.name()];
  if (!job) {
    job = std::make_unique<LayoutJob>();
    job->train(layout, "saved", until(2));
  }
  return *job;
}

fs::path saved_step(const Layout& layout) {
  return saved_by(layout).folder() / "saved/checkpoint/step-2";
}

// Takes the checkpoint up on the ranks of a layout and saves it again; where that is.
fs::path resave(const fs::path& step_folder, const Layout& layout, const LayoutJob& job) {
  const JobConfig config = job.config(layout, "resaved", until(3));
  const auto resolved = resolve_model(config);
  const fs::path folder = job.folder() / "resaved" / layout.name();
  test::run_ranks(layout.ranks(), [&](dtensor::World& world) {
    const auto dims = parallel::ParallelDims::make(config, world);
    train::Trainer trainer(config, resolved, dims);
    trainer.restore(step_folder);
    checkpoint::save(folder, trainer.snapshot(), {.ranks = dims.all.get()});
  });
  return checkpoint::step_path(folder, 2);
}

// By the checksums of each tensor's global contents, which are those of its bits.
void expect_same_state(const fs::path& a, const fs::path& b) {
  const checkpoint::CheckpointReader x(a), y(b);
  y.verify();
  ASSERT_EQ(x.names(), y.names());
  for (const auto& name : x.names()) {
    EXPECT_EQ(x.checksum(name), y.checksum(name)) << name;
    EXPECT_EQ(x.info(name).shape, y.info(name).shape) << name;
    EXPECT_EQ(x.info(name).dtype, y.info(name).dtype) << name;
  }
  for (const char* key : {"step", "rows", "tokens", "seed", "optimizer_steps"}) {
    EXPECT_EQ(x.manifest().trainer[key], y.manifest().trainer[key]) << key;
  }
}

void expect_all_parts(const fs::path& step_folder) {
  const checkpoint::CheckpointReader reader(step_folder);
  int moments = 0, biases = 0;
  for (const auto& name : reader.names()) {
    const bool moment = name.starts_with("optimizer.");
    moments += moment;
    biases += name.ends_with("e_score_correction_bias");
    if (!moment) continue;
    EXPECT_GT(reader.load(name).abs().max().item<double>(), 0) << name;
  }
  EXPECT_GT(moments, 50);
  EXPECT_GT(biases, 1);
  EXPECT_GT(reader.manifest().trainer["tokens"], 0);
  EXPECT_EQ(reader.manifest().trainer["rows"], 2 * kRowsOfAStep);
}

using Pair = std::tuple<Layout, Layout>;

std::string name_of(const ::testing::TestParamInfo<Pair>& info) {
  return std::get<0>(info.param).name() + "_to_" + std::get<1>(info.param).name();
}

class Reshard : public ::testing::TestWithParam<Pair> {};

TEST_P(Reshard, ChangesNoBit) {
  const auto& [from, to] = GetParam();
  expect_all_parts(saved_step(from));
  expect_same_state(saved_step(from), resave(saved_step(from), to, saved_by(from)));
}

// Two steps in one layout and the third in another are the three steps of one rank, to the accuracy
// of layouts; in the same layout bit for bit those of the run that never stopped.
TEST_P(Reshard, GoesOnLikeTheUnbrokenRun) {
  const auto& [from, to] = GetParam();
  const LayoutJob job;
  const fs::path run = job.folder() / "run";
  fs::copy(saved_by(from).folder() / "saved", run, fs::copy_options::recursive);
  ASSERT_EQ(job.train(to, "run", until(3)), train::Outcome::kFinished);
  const LayoutResult actual = job.result("run");
  if (from.name() != to.name()) {
    expect_same(actual, one_rank({"--lr_scheduler.min_lr_factor", "1"}));
    return;
  }
  job.train(to, "unbroken", until(3));
  expect_identical(actual, job.result("unbroken"));
  expect_same_state(job.folder() / "unbroken/checkpoint/step-3", run / "checkpoint/step-3");
}

INSTANTIATE_TEST_SUITE_P(Each, Reshard,
                         ::testing::Combine(::testing::ValuesIn(kLayouts),
                                            ::testing::ValuesIn(kLayouts)),
                         name_of);

// Each layout once as what saves and once as what goes on, and two as both.
INSTANTIATE_TEST_SUITE_P(
    Chosen, Reshard,
    ::testing::Values(Pair{kLayouts[0], kLayouts[7]}, Pair{kLayouts[1], kLayouts[2]},
                      Pair{kLayouts[2], kLayouts[5]}, Pair{kLayouts[3], kLayouts[4]},
                      Pair{kLayouts[4], kLayouts[6]}, Pair{kLayouts[5], kLayouts[0]},
                      Pair{kLayouts[6], kLayouts[3]}, Pair{kLayouts[7], kLayouts[1]},
                      Pair{kLayouts[4], kLayouts[4]}, Pair{kLayouts[7], kLayouts[7]}),
    name_of);

}  // namespace
}  // namespace longhaul::testing
