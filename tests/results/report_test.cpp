// What the page is told of a run. How it looks is for eyes: docs/results.md has a picture.
#include "longhaul/train/results/report.h"

#include <algorithm>

#include "longhaul/base/error.h"
#include "longhaul/train/results/expert_load.h"
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
  EXPECT_EQ(found["lines"], 3);
  EXPECT_EQ(found["figures"]["lm_loss"],
            json::parse(R"({"points": [[1, 4.5], [2, 4.0], [3, 3.5]], "count": 3, "last": 3.5,
                            "mean": 4.0, "median": 4.0})"));
  EXPECT_EQ(found["by_layer"]["indexer_loss"]["1"]["points"][2], json::parse("[3, 0.35]"));
  EXPECT_EQ(found["by_layer"]["indexer_recall"]["0"]["points"][0], json::parse("[1, 0.5]"));
  EXPECT_EQ(found["seconds"]["backward"]["points"][0], json::parse("[1, 0.5]"));
  EXPECT_EQ(found["memory"]["activations"]["last"], 4194304);
}

TEST_F(Report, TheLoadIsInPercentOfTheMean) {
  write(3);
  const json load = data()["expert_load"];
  EXPECT_EQ(load["layers"], json::parse(R"(["1"])"));
  EXPECT_EQ(load["experts"], 3);
  ASSERT_EQ(load["frames"].size(), 3u);
  EXPECT_EQ(load["frames"][0], json::parse(R"({"step": 1, "percent": [100, 0, 200]})"));
}

TEST_F(Report, ALoadWithoutLayersIsNone) {
  std::filesystem::create_directories(folder_ / "run");
  test::spill(folder_ / "run/metrics.jsonl", "{\"step\": 1, \"expert_load\": {}}\n");
  EXPECT_TRUE(data()["expert_load"].is_null());
}

TEST_F(Report, FieldsOfAnotherShapeArePassedOver) {
  write(2);
  const auto metrics = folder_ / "run/metrics.jsonl";
  std::string lines = read_file(metrics);
  for (const char* load :
       {R"("text")", "[1, 2]", "7", R"({"one": [1, 2]})", R"({"": [1]})", R"({"-1": [1]})",
        R"({"99999999999999999999": [1]})", R"({"1": 3})", R"({"1": ["a", "b"]})", R"({"1": []})",
        R"({"1": {"a": 1}})", R"({"1": [1, 2], "2": [1]})", "null"}) {
    lines +=
        std::string(R"({"step": 3, "tokens": "many", "loss": [1], "seconds": 1, "memory": [1], )") +
        R"("indexer_loss_per_layer": {}, "expert_load": )" + load + "}\n";
  }
  test::spill(metrics, lines);
  const json found = data();
  EXPECT_EQ(found["steps"], 3);
  EXPECT_EQ(found["tokens"], 200);
  EXPECT_EQ(found["figures"]["loss"]["count"], 2);
  EXPECT_EQ(found["figures"]["loss"]["last"], 4.25);
  EXPECT_EQ(found["expert_load"]["frames"].size(), 2u);
}

// A run that goes on writes its last line anew, also between the two times that it is read.
TEST_F(Report, AHalfWrittenLastLineIsPassedOver) {
  write(3);
  const auto metrics = folder_ / "run/metrics.jsonl";
  const std::string whole = read_file(metrics);
  std::vector<int64_t> places;
  for_each_step(metrics, [&](const json&, int64_t place) { places.push_back(place); });
  ASSERT_EQ(places.size(), 3u);
  for (size_t length = static_cast<size_t>(places[2]); length + 2 < whole.size(); length += 29) {
    test::spill(metrics, whole.substr(0, length));
    EXPECT_EQ(expert_load(metrics, places)["frames"].size(), 2u) << length;
    EXPECT_EQ(data()["steps"], 2) << length;
    EXPECT_EQ(data()["expert_load"]["frames"].size(), 2u) << length;
  }
  test::spill(metrics, whole.substr(0, 10));
  EXPECT_TRUE(expert_load(metrics, places).is_null());
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
  EXPECT_EQ(found["starts"], json::array());
}

// No point is drawn, but the run's last loss is not the last finite one.
TEST_F(Report, TheLastLossIsThatOfTheLastStep) {
  std::vector<StepMetrics> steps = {test::small_step(1), test::small_step(2)};
  steps[1].lm_loss = -NAN;
  steps[1].grad_norm = INFINITY;
  test::write_run(folder_ / "run", steps);
  const json found = data();
  EXPECT_EQ(found["figures"]["lm_loss"],
            json::parse(R"({"points": [[1, 4.5]], "count": 1, "last": "nan", "mean": 4.5,
                            "median": 4.5})"));
  EXPECT_EQ(found["figures"]["grad_norm"]["last"], "inf");
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
  const json& curve = found["figures"]["lm_loss"]["points"];
  EXPECT_LE(curve.size(), 2002u);
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

// Noise with a heavy tail: the extremes of each stretch say little of what lies between.
TEST_F(Report, FiguresOfALongRunAreThoseOfAllItsSteps) {
  constexpr int64_t kSteps = 20'000;
  std::vector<StepMetrics> steps;
  std::vector<double> values;
  uint32_t state = 1;
  for (int64_t step = 1; step <= kSteps; ++step) {
    state = state * 1664525 + 1013904223;
    const double noise = static_cast<double>(state >> 8) / (1 << 24);
    StepMetrics metrics;
    metrics.step = step;
    metrics.lm_loss = metrics.tokens_per_second = 3 + std::pow(noise, 8);
    if (step % 4000 == 0) metrics.seconds["checkpoint"] = 2;
    values.push_back(metrics.lm_loss);
    steps.push_back(metrics);
  }
  test::write_run(folder_ / "run", steps);
  const json found = data();
  const json& curve = found["figures"]["lm_loss"];
  double sum = 0;
  for (const double value : values) sum += value;
  EXPECT_EQ(curve["count"], kSteps);
  EXPECT_EQ(curve["last"], values.back());
  EXPECT_NEAR(curve["mean"].get<double>(), sum / kSteps, 1e-12);
  EXPECT_EQ(curve["points"].front(), json({1, values.front()}));
  EXPECT_EQ(curve["points"].back(), json({kSteps, values.back()}));
  std::sort(values.begin(), values.end());
  EXPECT_EQ(found["figures"]["tokens_per_second"]["median"], values[kSteps / 2]);
  EXPECT_EQ(found["seconds"]["checkpoint"]["count"], 5);
  // What smoothing starts from averages to the curve's own mean; the extremes do not.
  ASSERT_EQ(curve["means"].size(), 1000u);
  double of_means = 0, of_points = 0;
  for (const auto& [step, value] : curve["means"].get<std::vector<std::pair<int64_t, double>>>()) {
    of_means += value / 1000;
  }
  for (const auto& point : curve["points"]) {
    of_points += point[1].get<double>() / static_cast<double>(curve["points"].size());
  }
  EXPECT_NEAR(of_means, sum / kSteps, 1e-9);
  EXPECT_GT(of_points, sum / kSteps + 0.1);
}

TEST_F(Report, LayersFromAHundredOn) {
  StepMetrics metrics;
  metrics.step = 1;
  metrics.indexer_loss_per_layer.assign(102, 0.5);
  test::write_run(folder_ / "run", {metrics});
  EXPECT_EQ(data()["by_layer"]["indexer_loss"]["101"]["last"], 0.5);
}

TEST_F(Report, OnePageWithoutANetwork) {
  write(2, "a");
  write(3, "b/a");
  test::spill(folder_ / "a/job.toml", "[job]\ndescription = \"</script><b>\"\n");
  test::spill(folder_ / "a/environment.json", R"({"starts": [{"cpu": "one of these"}]})");
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
