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

  // What the weights as they are choose for the rows of a step.
  deepseek_v3::Decisions decisions(uint64_t step) {
    const at::NoGradGuard no_grad;
    const auto batch = train::load_batch(trainer_.dataset(), step * kRowsOfStep, kRowsOfStep);
    deepseek_v3::Decisions decisions;
    deepseek_v3::ForwardContext ctx;
    ctx.pass = deepseek_v3::Pass::kEvaluate;
    ctx.counts.add(batch);
    ctx.decisions = &decisions;
    trainer_.model().forward(batch, ctx);
    return decisions;
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
    for (size_t i = 0; i < to.size(); ++i) to.at(i).tensor->copy_(*from.at(i).tensor);
  }

  dtensor::World world_;
  parallel::ParallelDims dims_;
  train::Trainer trainer_;
};

int64_t differing_rows(const at::Tensor& a, const at::Tensor& b) {
  return (a != b).any(-1).sum().item<int64_t>();
}

TEST(Quickstart, SameKeysWithAndWithoutConverters) {
  const TemporaryFolder folder;
  write_rows(folder.path() / "rows.jsonl");
  const JobConfig with = quickstart(folder.path());
  EXPECT_EQ(with.model.converters.size(), 6);
  QuickstartJob fused(with), plain(quickstart(folder.path(), {"--model.converters", ""}));
  int64_t rows = 0, different = 0;
  double first_loss = 0, last_loss = 0;
  for (uint64_t i = 0; i < kSteps; ++i) {
    SCOPED_TRACE("step " + std::to_string(i));
    plain.take_weights_of(fused);
    const auto expected = plain.decisions(i), actual = fused.decisions(i);
    ASSERT_EQ(expected.topk_indices.size(), 4);
    for (const auto& [layer, keys_BSK] : expected.topk_indices) {
      EXPECT_LT(keys_BSK.size(2), static_cast<int64_t>(kSeqLen));  // there is something to choose
      rows += keys_BSK.size(0) * keys_BSK.size(1);
      different += differing_rows(actual.topk_indices.at(layer), keys_BSK);
    }
    last_loss = fused.step().lm_loss;
    if (i == 0) first_loss = last_loss;
  }
  // Where two scores tie but for their rounding either key may be taken, and then others later on.
  EXPECT_LE(different, rows / 1000) << "of " << rows;
  EXPECT_LT(last_loss, 0.95 * first_loss);  // these are not the scores of random weights
}

}  // namespace
}  // namespace longhaul::testing
