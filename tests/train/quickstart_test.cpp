// What docs/start.md says of configs/quickstart.toml: with and without converters the same keys are
// chosen in fp32. The job file as it stands, on shorter rows of a small text.
#include <ATen/core/grad_mode.h>

#include "longhaul/base/file.h"
#include "longhaul/train/data_source.h"
#include "longhaul/train/trainer.h"
#include "tests/support/source_folder.h"
#include "tests/train/job_fixture.h"

namespace longhaul::testing {
namespace {

using Words = std::vector<std::string>;

constexpr uint64_t kRowsOfStep = 2, kSeqLen = 192;
constexpr uint64_t kSteps = 12;

JobConfig quickstart(const fs::path& folder, const Words& more = {}) {
  Words words = {"--job.dump_folder=" + (folder / "run").string(),
                 "--training.dataset=tokenized",
                 "--training.dataset_path=" + (folder / "rows.jsonl").string(),
                 "--training.seq_len=" + std::to_string(kSeqLen),
                 "--training.local_batch_size=" + std::to_string(kRowsOfStep),
                 "--training.steps=" + std::to_string(kSteps)};
  words.insert(words.end(), more.begin(), more.end());
  return load_job(test::source_folder() + "/configs/quickstart.toml", words);
}

// Rows of the documentation's bytes, one token each.
void write_rows(const fs::path& path) {
  const std::string text = read_file(test::source_folder() + "/docs/start.md");
  std::string rows;
  for (uint64_t row = 0; row < kSteps * kRowsOfStep; ++row) {
    std::vector<int> ids;
    for (uint64_t i = 0; i < kSeqLen; ++i) {
      ids.push_back(static_cast<unsigned char>(text.at((row * kSeqLen + i) % text.size())));
    }
    rows += nlohmann::json{{"input_ids", ids}}.dump() + "\n";
  }
  write_text(path, rows);
}

class QuickstartJob {
 public:
  explicit QuickstartJob(const JobConfig& config)
      : world_(dtensor::World::single()),
        dims_(parallel::ParallelDims::make(config, world_)),
        trainer_(config, resolve_model(config), dims_) {}

  struct Choice {
    deepseek_v3::Decisions decisions;
    at::Tensor visible_keys_BS;  // of each query; 0 for padding
  };

  // What the weights as they are choose for the rows of a step.
  Choice choice(uint64_t step) {
    const at::NoGradGuard no_grad;
    const auto batch = train::load_batch(trainer_.dataset(), step * kRowsOfStep, kRowsOfStep);
    const auto& slots = batch.towers[0];
    const auto position = at::arange(slots.doc_start.size(1), slots.doc_start.options());
    Choice choice = {.decisions = {}, .visible_keys_BS = position + 1 - slots.doc_start};
    deepseek_v3::ForwardContext ctx;
    ctx.pass = deepseek_v3::Pass::kEvaluate;
    ctx.counts.add(batch);
    ctx.decisions = &choice.decisions;
    trainer_.model().forward(batch, ctx);
    return choice;
  }

  void take_weights_of(QuickstartJob& other) {
    const at::NoGradGuard no_grad;
    auto &from = other.trainer_.model(), &to = trainer_.model();
    copy(from.parameters(), to.parameters());
    copy(from.buffers(), to.buffers());
  }

  train::StepMetrics step() { return trainer_.step(); }

 private:
  using Tensors = std::vector<nn::NamedParameter>;
  static void copy(const Tensors& from, const Tensors& to) {
    ASSERT_EQ(from.size(), to.size());
    for (size_t i = 0; i < to.size(); ++i) {
      ASSERT_EQ(from.at(i).name, to.at(i).name);
      to.at(i).tensor->copy_(*from.at(i).tensor);
    }
  }

  dtensor::World world_;
  parallel::ParallelDims dims_;
  train::Trainer trainer_;
};

int64_t count_of(const at::Tensor& rows) { return rows.sum().item<int64_t>(); }

TEST(Quickstart, SameKeysWithAndWithoutConverters) {
  const TemporaryFolder folder;
  write_rows(folder.path() / "rows.jsonl");
  const JobConfig with = quickstart(folder.path());
  const JobConfig without = quickstart(folder.path(), {"--model.converters", ""});
  EXPECT_EQ(with.model.converters.size(), 6);
  EXPECT_TRUE(without.model.converters.empty());
  QuickstartJob fused(with), plain(without);
  int64_t rows = 0, different = 0;
  double first_loss = 0, last_loss = 0;
  for (uint64_t i = 0; i < kSteps; ++i) {
    SCOPED_TRACE("step " + std::to_string(i));
    plain.take_weights_of(fused);
    const auto expected = plain.choice(i), actual = fused.choice(i);
    ASSERT_EQ(expected.decisions.topk_indices.size(), 4);
    for (const auto& [layer, keys_BSK] : expected.decisions.topk_indices) {
      const auto& found = actual.decisions.topk_indices.at(layer);
      const auto differs = (found != keys_BSK).any(-1);
      // Elsewhere there is nothing to choose.
      const auto chooses = expected.visible_keys_BS > keys_BSK.size(2);
      EXPECT_EQ(count_of(differs.logical_and(chooses.logical_not())), 0) << "layer " << layer;
      rows += count_of(chooses);
      different += count_of(differs.logical_and(chooses));
    }
    last_loss = fused.step().lm_loss;
    if (i == 0) first_loss = last_loss;
  }
  EXPECT_GT(rows, 1000);
  // Where two scores tie but for their rounding either key may be taken, and then others later on.
  EXPECT_LE(different, rows / 1000) << "of " << rows;
  EXPECT_LT(last_loss, 0.95 * first_loss);  // these are not the scores of random weights
}

}  // namespace
}  // namespace longhaul::testing
