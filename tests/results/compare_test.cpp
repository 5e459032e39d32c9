#include "longhaul/train/results/compare.h"

#include "longhaul/base/error.h"
#include "tests/results/run_folder.h"

namespace longhaul::train {
namespace {

using ::testing::HasSubstr;

class Compare : public ::testing::Test {
 protected:
  // Runs a and b of `steps` steps; `change` alters those of b.
  template <typename Change>
  void write(int64_t steps, const Change& change) const {
    std::vector<StepMetrics> a, b;
    for (int64_t step = 1; step <= steps; ++step) {
      a.push_back(test::small_step(step));
      b.push_back(a.back());
      change(b.back());
    }
    test::write_run(folder_ / "a", a);
    test::write_run(folder_ / "b", b);
  }
  Comparison compare(const CompareOptions& options = {}) const {
    return compare_runs(folder_ / "a", folder_ / "b", options);
  }
  static const FigureDifference& figure(const Comparison& comparison, const std::string& name) {
    for (const auto& one : comparison.figures) {
      if (one.name == name) return one;
    }
    throw Error("no figure " + name);
  }

  test::TempFolder folder_;
};

TEST_F(Compare, TheSameNumbersButForTimes) {
  write(4, [](auto& metrics) { metrics.tokens_per_second *= 2; });
  const auto found = compare();
  EXPECT_TRUE(found.equal());
  EXPECT_EQ(verdict(found, {}), "the runs are the same, bit for bit");
  EXPECT_EQ(figure(found, "lm_loss").steps, 4);
  EXPECT_EQ(figure(found, "lm_loss").largest_step, 0);
}

TEST_F(Compare, TheLastBitOfALossIsSeen) {
  write(4, [](auto& metrics) {
    if (metrics.step == 3) metrics.lm_loss = std::nextafter(metrics.lm_loss, 9.0);
  });
  const auto found = compare();
  EXPECT_FALSE(found.equal());
  EXPECT_EQ(figure(found, "lm_loss").first_beyond, 3);
  EXPECT_FALSE(figure(found, "loss").first_beyond.has_value());
  EXPECT_THAT(verdict(found, {}), HasSubstr("first in lm_loss at step 3"));
  EXPECT_TRUE(compare({.rtol = 1e-12}).equal());
}

TEST_F(Compare, TheLargestDifferenceAndTheFirstBeyondTheTolerance) {
  write(4, [](auto& metrics) { metrics.grad_norm *= 1 + 1e-4 * std::pow(10, metrics.step - 3); });
  const auto found = compare({.rtol = 5e-5});
  const auto& norm = figure(found, "grad_norm");
  EXPECT_EQ(norm.first_beyond, 3);
  EXPECT_EQ(norm.largest_step, 4);
  EXPECT_NEAR(norm.largest, 1.5e-3, 1e-6);
  EXPECT_NEAR(norm.largest_relative, 1e-3, 2e-6);
  EXPECT_TRUE(compare({.rtol = 2e-3}).equal());
  EXPECT_THAT(to_table(found), ::testing::ContainsRegex("grad_norm +4 +0.0015 +0.000999 +4 +3\n"));
}

TEST_F(Compare, WhatIsNotFinite) {
  write(2, [](auto&) {});
  auto both = test::small_step(1), one = test::small_step(1);
  both.loss = NAN;
  test::write_run(folder_ / "a", {both});
  test::write_run(folder_ / "b", {both});
  EXPECT_TRUE(compare().equal());
  test::write_run(folder_ / "b", {one});
  EXPECT_FALSE(compare({.rtol = 1e9}).equal());
  both.loss = INFINITY;
  test::write_run(folder_ / "a", {both});
  EXPECT_FALSE(compare({.rtol = 1e9}).equal());
}

TEST_F(Compare, RunsOfDifferentLengths) {
  write(4, [](auto&) {});
  test::write_run(folder_ / "b", {test::small_step(1), test::small_step(2)});
  EXPECT_FALSE(compare().equal());
  EXPECT_THAT(verdict(compare(), {}), HasSubstr("2 only the first one has, from step 3 on"));
  EXPECT_TRUE(compare({.steps = 2}).equal());
  EXPECT_THROW(compare({.steps = 3}), UserError);
}

// Of a damaged line it cannot be told what it held.
TEST_F(Compare, AStepThatIsMissingBetweenOthersIsNoDifference) {
  write(4, [](auto&) {});
  test::write_run(folder_ / "b", {test::small_step(1), test::small_step(2), test::small_step(4)});
  const std::string lacks = test::error_of<UserError>([&] { compare(); });
  EXPECT_THAT(lacks, HasSubstr("/b' lacks step 3 between others"));
  EXPECT_THAT(lacks, HasSubstr("cannot be told"));
  EXPECT_TRUE(compare({.steps = 2}).equal());
}

ValidationResult validated(double loss) { return {.loss = loss, .labels = 1, .bits_per_byte = {}}; }

// As where the first of two runs ends with this step, and each validates at its end.
TEST_F(Compare, AValidationThatOneRunLacksIsNoDifference) {
  write(3, [](auto& metrics) {
    if (metrics.step == 2) metrics.validation = validated(3);
  });
  const auto found = compare();
  EXPECT_TRUE(found.equal());
  EXPECT_EQ(figure(found, "validation_loss").steps, 0);
  EXPECT_THAT(to_table(found),
              HasSubstr("validation_loss: only one run has it at 1 step, the first is 2\n"));
}

TEST_F(Compare, ValidationsOfBothRunsAreCompared) {
  write(2, [](auto&) {});
  std::vector<StepMetrics> a = {test::small_step(1), test::small_step(2)}, b = a;
  a[0].validation = b[0].validation = validated(3);
  a[1].validation = validated(2);
  b[1].validation = validated(2.5);
  test::write_run(folder_ / "a", a);
  test::write_run(folder_ / "b", b);
  EXPECT_EQ(figure(compare(), "validation_loss").steps, 2);
  EXPECT_EQ(figure(compare(), "validation_loss").first_beyond, 2);
}

TEST_F(Compare, ALossThatOneRunLacksIsADifference) {
  write(2, [](auto&) {});
  test::spill(folder_ / "b/metrics.jsonl", "{\"step\":1}\n{\"step\":2}\n");
  EXPECT_FALSE(compare({.rtol = 1}).equal());
}

TEST_F(Compare, WhatIsNoRun) {
  write(1, [](auto&) {});
  const auto error = [&](const fs::path& other) -> std::string {
    try {
      compare_runs(folder_ / "a", other, {});
    } catch (const UserError& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_THAT(error(folder_ / "none"), HasSubstr("is not a folder"));
  fs::create_directories(folder_ / "empty");
  EXPECT_THAT(error(folder_ / "empty"), HasSubstr("holds no metrics.jsonl"));
  test::spill(folder_ / "empty/metrics.jsonl", "");
  EXPECT_THAT(error(folder_ / "empty"), HasSubstr("holds no step"));
}

}  // namespace
}  // namespace longhaul::train
