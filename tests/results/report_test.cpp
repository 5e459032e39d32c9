// What the page is told of a run. How it looks is for eyes: docs/results.md has a picture.
#include "longhaul/train/results/report.h"

#include "longhaul/base/error.h"
#include "tests/results/run_folder.h"

namespace longhaul::train {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::Not;

class Report : public ::testing::Test {
 protected:
  void write(int64_t steps, const std::string& name = "run") const {
    std::vector<StepMetrics> all;
    for (int64_t step = 1; step <= steps; ++step) all.push_back(test::small_step(step));
    test::write_run(folder_ / name, all);
  }
  // By way of text, as the page gets it.
  json data(const std::string& name = "run") const {
    return json::parse(report_data(read_run(folder_ / name)).dump());
  }

  test::TempFolder folder_;
};

TEST_F(Report, CurvesOfARun) {
  write(3);
  const json found = data();
  EXPECT_EQ(found["name"], "run");
  EXPECT_EQ(found["steps"], 3);
  EXPECT_EQ(found["tokens"], 300);
  EXPECT_EQ(found["figures"]["lm_loss"], json::parse("[[1, 4.5], [2, 4.0], [3, 3.5]]"));
  EXPECT_EQ(found["by_layer"]["indexer_loss"]["01"][2], json::parse("[3, 0.35]"));
  EXPECT_EQ(found["by_layer"]["indexer_recall"]["00"][0], json::parse("[1, 0.5]"));
  EXPECT_EQ(found["seconds"]["backward"][0], json::parse("[1, 0.5]"));
  EXPECT_EQ(found["memory"]["activations"][0], json::parse("[1, 4194304]"));
}

TEST_F(Report, TheLoadIsInPercentOfTheMean) {
  write(3);
  const json load = data()["expert_load"];
  EXPECT_EQ(load["layers"], json::parse(R"(["1"])"));
  EXPECT_EQ(load["experts"], 3);
  ASSERT_EQ(load["frames"].size(), 3u);
  EXPECT_EQ(load["frames"][0], json::parse(R"({"step": 1, "percent": [100, 0, 200]})"));
}

TEST_F(Report, WhatARunHasNot) {
  StepMetrics bare;
  bare.step = 1;
  bare.loss = NAN;
  bare.skipped = true;
  test::write_run(folder_ / "run", {bare});
  const json found = data();
  EXPECT_TRUE(found["expert_load"].is_null());
  EXPECT_FALSE(found["figures"].contains("loss"));  // not finite
  EXPECT_EQ(found["skipped"], json::parse("[1]"));
  EXPECT_EQ(found["job"], "");
  EXPECT_EQ(found["environment"], json::object());
}

TEST_F(Report, ALongRunIsThinnedAndKeepsItsSpikes) {
  std::vector<StepMetrics> steps;
  for (int64_t step = 1; step <= 20'000; ++step) {
    StepMetrics metrics;
    metrics.step = step;
    metrics.lm_loss = step == 12'345 ? 99.0
                      : step == 777  ? -99.0
                                     : 3.0 + 1e-6 * static_cast<double>(step);
    metrics.expert_load[0] = {1, 2};
    steps.push_back(metrics);
  }
  test::write_run(folder_ / "run", steps);
  const json found = data();
  const json& curve = found["figures"]["lm_loss"];
  EXPECT_LE(curve.size(), 2000u);
  EXPECT_GE(curve.size(), 1000u);
  EXPECT_EQ(curve.front()[0], 1);
  EXPECT_EQ(curve.back()[0], 20'000);
  int spikes = 0;
  for (size_t i = 0; i < curve.size(); ++i) {
    if (i > 0) {
      EXPECT_LT(curve[i - 1][0], curve[i][0]);
    }
    spikes += static_cast<int>(std::abs(curve[i][1].get<double>()) == 99);
  }
  EXPECT_EQ(spikes, 2);
  const json& frames = found["expert_load"]["frames"];
  EXPECT_EQ(frames.size(), 60u);
  EXPECT_EQ(frames.front()["step"], 1);
  EXPECT_EQ(frames.back()["step"], 20'000);
}

TEST_F(Report, OnePageWithoutANetwork) {
  write(2, "a");
  write(3, "b/a");
  test::spill(folder_ / "a/job.toml", "[job]\ndescription = \"</script><b>\"\n");
  test::spill(folder_ / "a/environment.json", R"({"cpu": "one of these"})");
  const std::string page = report_page({folder_ / "a", folder_ / "b/a"});
  EXPECT_THAT(page, ::testing::StartsWith("<!doctype html>"));
  for (const char* part : {"one of these", "prefers-color-scheme", "@media print", "viewport",
                           "class LineChart", "class LoadMap"}) {
    EXPECT_THAT(page, HasSubstr(part));
  }
  for (const char* part : {"src=", "href=", "https:", "fetch(", "@import", "</script><b>"}) {
    EXPECT_THAT(page, Not(HasSubstr(part)));
  }
  EXPECT_THAT(page, HasSubstr((folder_ / "b/a").string()));  // two runs of one name
  EXPECT_THROW(report_page({folder_ / "none"}), UserError);
}

}  // namespace
}  // namespace longhaul::train
