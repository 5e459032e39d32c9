// What docs/start.md says of configs/quickstart.toml: with and without converters the losses agree
// to 1e-4 in fp32 (and the same keys are chosen: tests/train/quickstart_test.cpp). The job file as
// it stands, on a small corpus and on shorter rows.
#include "tests/cli/small_job.h"
#include "tests/support/source_folder.h"

namespace longhaul::test {
namespace {

// Later rounding alone parts them, as it parts fp32 from fp64: where two scores nearly tie, another
// key or expert is taken.
constexpr size_t kSteps = 12;

class Quickstart : public SmallJob {
 protected:
  ProgramResult train_quickstart(const std::string& run_folder, Words more = {}) const {
    Words words = {"train", test::source_folder() + "/configs/quickstart.toml"};
    const std::vector<std::pair<std::string, std::string>> settings = {
        {"--job.dump_folder", run_folder},
        {"--model.hf_assets_path", "tokenizer"},
        {"--training.dataset_path", "corpus/train"},
        {"--training.seq_len", "192"},
        {"--training.local_batch_size", "2"},
        {"--training.steps", std::to_string(kSteps)},
        {"--metrics.log_freq", "1"},
        {"--validation.enable", "false"},
        {"--checkpoint.enable", "false"}};
    for (const auto& [key, value] : settings) words.insert(words.end(), {key, value});
    words.insert(words.end(), more.begin(), more.end());
    return run(words);
  }
};

TEST_F(Quickstart, LossesAgreeWithAndWithoutConverters) {
  const auto fused = train_quickstart("fused");
  expect_trained(fused);
  EXPECT_THAT(fused.err, ::testing::HasSubstr("kernels"));
  const auto plain = train_quickstart("plain", {"--model.converters", ""});
  expect_trained(plain);
  EXPECT_THAT(plain.err, ::testing::HasSubstr("none: every operator is the reference"));

  const auto expected = metrics("plain"), actual = metrics("fused");
  ASSERT_EQ(expected.size(), kSteps);
  ASSERT_EQ(actual.size(), kSteps);
  for (size_t i = 0; i < kSteps; ++i) {
    for (const char* key : {"loss", "lm_loss", "indexer_loss"}) {
      const double value = expected[i][key].get<double>();
      EXPECT_GT(value, 0) << key;
      // The reference's KL is a difference of fp32 logarithms, good to some 1e-7.
      EXPECT_NEAR(actual[i][key].get<double>(), value, 1e-4 * value + 1e-7)
          << key << " of step " << i + 1;
    }
  }
  EXPECT_LT(actual.back()["lm_loss"].get<double>(), 0.95 * actual[0]["lm_loss"].get<double>());
}

}  // namespace
}  // namespace longhaul::test
