#include "longhaul/optim/lr_schedule.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numbers>
#include <vector>

namespace longhaul::optim {
namespace {

LrScheduleOptions options_of(double lr, int64_t steps, int64_t warmup_steps) {
  LrScheduleOptions options;
  options.lr = lr;
  options.steps = steps;
  options.warmup_steps = warmup_steps;
  return options;
}

std::vector<double> rates(const LrScheduleOptions& options) {
  const LrSchedule schedule(options);
  std::vector<double> values;
  for (int64_t step = 1; step <= options.steps; ++step) values.push_back(schedule.lr(step));
  return values;
}

void expect_near(const std::vector<double>& actual, const std::vector<double>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) EXPECT_NEAR(actual[i], expected[i], 1e-12) << i + 1;
}

// Ten steps: two of warm-up, a decay of 0.4 * 10 = 4 steps, in between (with the virtual last step)
// 10 + 1 - 2 - 4 = 5 stable ones. The decay's steps are 8, 9, 10 and the virtual 11.
LrScheduleOptions ten_steps(DecayType type) {
  return {.lr = 1.0,
          .steps = 10,
          .warmup_steps = 2,
          .decay_ratio = 0.4,
          .decay_type = type,
          .min_lr_factor = 0.1};
}

std::vector<double> decayed(double a, double b, double c) {
  return {0.5, 1, 1, 1, 1, 1, 1, 0.1 + 0.9 * a, 0.1 + 0.9 * b, 0.1 + 0.9 * c};
}

TEST(LrSchedule, Linear) {
  expect_near(rates(ten_steps(DecayType::kLinear)), decayed(0.75, 0.5, 0.25));
}

TEST(LrSchedule, Sqrt) {
  expect_near(rates(ten_steps(DecayType::kSqrt)),
              decayed(1 - std::sqrt(0.25), 1 - std::sqrt(0.5), 1 - std::sqrt(0.75)));
}

TEST(LrSchedule, Cosine) {
  const auto half_wave = [](double x) { return 0.5 * (1 + std::cos(std::numbers::pi * x)); };
  expect_near(rates(ten_steps(DecayType::kCosine)),
              decayed(half_wave(0.25), half_wave(0.5), half_wave(0.75)));
}

TEST(LrSchedule, WithoutARatioItDecaysRightAfterTheWarmup) {
  expect_near(rates(options_of(2.0, 4, 1)), {2.0, 2.0, 2.0 * (1 - 1.0 / 3), 2.0 * (1 - 2.0 / 3)});
}

TEST(LrSchedule, Constant) {
  auto options = options_of(0.3, 3, 0);
  options.min_lr_factor = 1.0;
  expect_near(rates(options), {0.3, 0.3, 0.3});
}

TEST(LrSchedule, WarmupAndDecayAreCutToTheTraining) {
  expect_near(rates(options_of(1.0, 2, 200)), {0.5, 1.0});
  auto options = options_of(1.0, 4, 2);
  options.decay_ratio = 0.9;
  expect_near(rates(options), {0.5, 1.0, 1.0, 0.5});
}

}  // namespace
}  // namespace longhaul::optim
