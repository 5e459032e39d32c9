#include "longhaul/train/summary.h"

#include "longhaul/base/file.h"
#include "tests/results/run_folder.h"

namespace longhaul::train {
namespace {

TEST(Summary, TellsFirstAndLastStepAndDrawsTheCurve) {
  const test::TempFolder folder;
  std::string lines;
  for (int step = 1; step <= 3; ++step) {
    StepMetrics metrics;
    metrics.step = step;
    metrics.lm_loss = 9.0 - step;
    metrics.loss = metrics.lm_loss;
    metrics.tokens = 1000 * step;
    metrics.tokens_per_second = 500;
    lines += to_json(metrics).dump() + "\n";
  }
  test::spill(folder / "metrics.jsonl", lines);
  write_summary(folder.path());
  const std::string text = read_file(folder / "summary.md");
  EXPECT_NE(text.find("3 steps, 3,000 tokens"), std::string::npos) << text;
  EXPECT_NE(text.find("| language model loss | 8.0000 | 6.0000 |"), std::string::npos) << text;
  const std::string svg = read_file(folder / "loss.svg");
  EXPECT_NE(svg.find("<polyline"), std::string::npos);
  EXPECT_EQ(svg.find("nan"), std::string::npos);
}

TEST(Summary, APointAloneCanBeDrawn) {
  const std::string svg = plot_svg({{"one", {{1, 2}}}, {"none", {}}}, "step", "loss");
  EXPECT_EQ(svg.find("nan"), std::string::npos) << svg;
  EXPECT_EQ(svg.find("inf"), std::string::npos) << svg;
}

}  // namespace
}  // namespace longhaul::train
