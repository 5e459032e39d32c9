#include "longhaul/train/metrics.h"

#include "tests/results/run_folder.h"
#include "tests/support/log_capture.h"

namespace longhaul::train {
namespace {

TEST(Metrics, NonFiniteNumbersAreStrings) {
  StepMetrics metrics;
  metrics.loss = NAN;
  metrics.grad_norm = INFINITY;
  metrics.lm_loss = -INFINITY;
  metrics.indexer_loss_per_layer = {0.5, NAN};
  const auto json = nlohmann::json::parse(to_json(metrics).dump());
  EXPECT_EQ(json["loss"], "nan");
  EXPECT_EQ(json["grad_norm"], "inf");
  EXPECT_EQ(json["lm_loss"], "-inf");
  EXPECT_EQ(json["indexer_loss_per_layer"][1], "nan");
  EXPECT_TRUE(std::isnan(number_from(json["loss"])));
  EXPECT_EQ(number_from(json["lm_loss"]), -INFINITY);
}

TEST(Metrics, LinesShowNoSignOfANaN) {
  StepMetrics metrics = test::small_step(1);
  metrics.loss = metrics.indexer_loss = metrics.grad_norm = std::copysign(NAN, -1.0);
  metrics.lm_loss = -INFINITY;
  const std::string line = to_line(metrics, /*steps=*/9, /*seconds_left=*/1);
  EXPECT_THAT(line, ::testing::HasSubstr("loss nan  lm -inf  indexer nan  grad nan "));
  EXPECT_THAT(short_line(metrics, /*seconds_left=*/1), ::testing::StartsWith("loss nan, "));
}

TEST(Metrics, TheLogIsCutBackToTheResumedStep) {
  const test::TempFolder folder;
  const auto path = folder / "metrics.jsonl";
  test::spill(path, "{\"step\":1}\n{\"step\":2}\n{\"step\":3}\n{\"step\":4,\"lo");
  StepMetrics metrics;
  metrics.step = 3;
  StepLines(path, 2).append(to_json(metrics));
  const auto lines = read_metrics(path);
  ASSERT_EQ(lines.size(), 3u);
  EXPECT_EQ(lines[1]["step"], 2);
  EXPECT_EQ(lines[2]["step"], 3);
  EXPECT_TRUE(lines[2].contains("loss"));
}

// A run may be writing its last line; any other that is no step is damaged.
TEST(Metrics, DamagedLinesAreTold) {
  const test::TempFolder folder;
  const auto path = folder / "metrics.jsonl";
  const auto told = [&](const std::string& lines) {
    test::spill(path, lines);
    const test::LogCapture log;
    EXPECT_EQ(read_metrics(path).size(), 2u);
    return log.text();
  };
  EXPECT_EQ(told("{\"step\":1}\n{\"step\":2}\n"), "");
  EXPECT_EQ(told("{\"step\":1}\n{\"step\":2}\n{\"step\":3,\"lo"), "");
  const std::string one = told("{\"step\":1}\n{\"step\":2,\"lo\n{\"step\":3}\n");
  EXPECT_THAT(one, ::testing::HasSubstr("metrics.jsonl:2 is not a step; left out\n"));
  EXPECT_THAT(told("{\"step\":1}\n7\n{}\n{\"step\":3}\n"),
              ::testing::HasSubstr("metrics.jsonl:2 is not a step; left out; further lines like "
                                   "it: 1\n"));
}

}  // namespace
}  // namespace longhaul::train
