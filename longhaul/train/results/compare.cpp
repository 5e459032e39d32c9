#include "longhaul/train/results/compare.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <string_view>

#include "longhaul/base/error.h"
#include "longhaul/train/metrics.h"
#include "longhaul/train/results/run_files.h"

namespace longhaul::train {
namespace {

using nlohmann::json;

constexpr const char* kFigures[] = {"loss",         "lm_loss",      "mtp_loss",
                                    "indexer_loss", "balance_loss", "z_loss",
                                    "grad_norm",    "lr",           "validation_loss"};
constexpr size_t kNumFigures = std::size(kFigures);
constexpr std::string_view kSometimes = "validation_loss";  // when is the job's choice

// In the order of kFigures.
using Line = std::array<std::optional<double>, kNumFigures>;
using Steps = std::map<int64_t, Line>;

Line line_of(const json& object) {
  Line line;
  for (size_t i = 0; i < kNumFigures; ++i) {
    if (object.contains(kFigures[i])) line[i] = number_from(object[kFigures[i]]);
  }
  return line;
}

Steps steps_of(const std::filesystem::path& folder, const CompareOptions& options) {
  Steps steps;
  const auto metrics = read_run(folder).metrics;
  for_each_step(metrics, [&](const json& object, int64_t) {
    const auto step = object.at("step").get<int64_t>();
    if (options.steps == 0 || step <= options.steps) steps[step] = line_of(object);
  });
  if (steps.empty()) fail_user("'{}' holds no step yet", metrics.string());
  if (options.steps > 0 && static_cast<int64_t>(steps.size()) != options.steps) {
    fail_user("'{}' has {} of the first {} steps; compare fewer (--steps), or let the run go on",
              folder.string(), steps.size(), options.steps);
  }
  return steps;
}

// NaN equals NaN: what a run computes from the same numbers.
double difference(double a, double b) {
  if (a == b || (std::isnan(a) && std::isnan(b))) return 0;
  const double distance = std::abs(a - b);
  return std::isfinite(distance) ? distance : std::numeric_limits<double>::infinity();
}

double relative(double difference, double a, double b) {
  if (difference == 0 || std::isinf(difference)) return difference;
  return difference / std::max(std::abs(a), std::abs(b));
}

FigureDifference compare_figure(size_t i, const Steps& a, const Steps& b, double rtol) {
  constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
  FigureDifference found;
  found.name = kFigures[i];
  for (const auto& [step, line] : a) {
    const auto other = b.find(step);
    if (other == b.end() || (!line[i] && !other->second[i])) continue;
    if (line[i].has_value() != other->second[i].has_value()) {
      found.only_in_one.push_back(step);
      if (found.name == kSometimes) continue;
    }
    // A figure that only one of two lines has differs.
    const double x = line[i].value_or(kNone), y = other->second[i].value_or(kNone);
    const double distance = difference(x, y), share = relative(distance, x, y);
    found.steps += 1;
    found.largest = std::max(found.largest, distance);
    if (share > found.largest_relative) {
      found.largest_relative = share;
      found.largest_step = step;
    }
    if (share > rtol && !found.first_beyond) found.first_beyond = step;
  }
  return found;
}

std::vector<int64_t> missing_in(const Steps& other, const Steps& all) {
  std::vector<int64_t> missing;
  for (const auto& [step, line] : all) {
    if (other.count(step) == 0) missing.push_back(step);
  }
  return missing;
}

// A step that is missing between others stood in a damaged line, which says nothing of its numbers.
void refuse_gap(const std::filesystem::path& folder, const Steps& steps,
                const std::vector<int64_t>& missing) {
  for (const int64_t step : missing) {
    if (step < steps.begin()->first || step > steps.rbegin()->first) continue;
    fail_user(
        "'{}' lacks step {} between others, so whether the runs are the same cannot be told; "
        "compare the steps before it (--steps)",
        folder.string(), step);
  }
}

}  // namespace

bool Comparison::equal() const {
  return only_in_a.empty() && only_in_b.empty() &&
         std::none_of(figures.begin(), figures.end(),
                      [](const auto& one) { return one.first_beyond.has_value(); });
}

Comparison compare_runs(const std::filesystem::path& a, const std::filesystem::path& b,
                        const CompareOptions& options) {
  const Steps of_a = steps_of(a, options), of_b = steps_of(b, options);
  Comparison comparison{
      .figures = {}, .only_in_a = missing_in(of_b, of_a), .only_in_b = missing_in(of_a, of_b)};
  refuse_gap(a, of_a, comparison.only_in_b);
  refuse_gap(b, of_b, comparison.only_in_a);
  for (size_t i = 0; i < kNumFigures; ++i) {
    const auto found = compare_figure(i, of_a, of_b, options.rtol);
    if (found.steps > 0 || !found.only_in_one.empty()) comparison.figures.push_back(found);
  }
  return comparison;
}

std::string to_table(const Comparison& comparison) {
  std::string text = fmt::format("{:<18}{:>8}{:>16}{:>12}{:>10}{:>15}\n", "figure", "steps",
                                 "largest diff.", "relative", "at step", "first beyond");
  for (const auto& one : comparison.figures) {
    text += fmt::format("{:<18}{:>8}{:>16.3g}{:>12.3g}{:>10}{:>15}\n", one.name, one.steps,
                        one.largest, one.largest_relative,
                        one.largest_step == 0 ? "-" : std::to_string(one.largest_step),
                        one.first_beyond ? std::to_string(*one.first_beyond) : "-");
  }
  for (const auto& one : comparison.figures) {
    if (one.only_in_one.empty()) continue;
    text += fmt::format("{}: only one run has it at {} step{}, the first is {}\n", one.name,
                        one.only_in_one.size(), one.only_in_one.size() == 1 ? "" : "s",
                        one.only_in_one.front());
  }
  return text;
}

std::string verdict(const Comparison& comparison, const CompareOptions& options) {
  const auto& [figures, only_a, only_b] = comparison;
  if (!only_a.empty() || !only_b.empty()) {
    const auto& some = only_a.empty() ? only_b : only_a;
    return fmt::format(
        "the runs differ in their steps: {} only the {} one has, from step {} on; --steps N "
        "compares the first N",
        some.size(), only_a.empty() ? "second" : "first", some.front());
  }
  const FigureDifference* first = nullptr;
  for (const auto& one : figures) {
    if (one.first_beyond && (!first || *one.first_beyond < *first->first_beyond)) first = &one;
  }
  if (!first) {
    return options.rtol == 0 ? "the runs are the same, bit for bit"
                             : fmt::format("the runs are the same within {:g}", options.rtol);
  }
  return fmt::format("the runs differ: first in {} at step {}, by up to {:.3g} of it at step {}",
                     first->name, *first->first_beyond, first->largest_relative,
                     first->largest_step);
}

}  // namespace longhaul::train
