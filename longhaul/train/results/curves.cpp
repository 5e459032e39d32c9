#include "longhaul/train/results/curves.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "longhaul/train/metrics.h"
#include "longhaul/train/results/thinning.h"

namespace longhaul::train {
namespace {

using nlohmann::ordered_json;
using Points = std::vector<std::pair<int64_t, double>>;

constexpr size_t kStretches = 1000;

double sum_of(const Points& points, size_t first, size_t end) {
  return std::accumulate(points.begin() + static_cast<std::ptrdiff_t>(first),
                         points.begin() + static_cast<std::ptrdiff_t>(end), 0.0,
                         [](double sum, const auto& point) { return sum + point.second; });
}

// Each at the step in its middle.
Points means_of_stretches(const Points& points) {
  Points means;
  for_each_stretch(points.size(), kStretches, [&](size_t first, size_t end) {
    means.emplace_back(points[first + (end - first) / 2].first,
                       sum_of(points, first, end) / static_cast<double>(end - first));
  });
  return means;
}

// The upper one of two.
double median_of(const Points& points) {
  std::vector<double> values;
  for (const auto& [step, value] : points) values.push_back(value);
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

ordered_json in_json(double value) {
  if (std::isfinite(value)) return value;
  return std::isnan(value) ? "nan" : fmt::format("{}", value);
}

}  // namespace

void Curves::add(const std::string& name, int64_t step, const nlohmann::json& value) {
  if (!value.is_number() && !value.is_string()) return;
  const double number = number_from(value);
  last_[name] = number;
  if (std::isfinite(number)) points_[name].emplace_back(step, number);
}

ordered_json Curves::to_json() const {
  ordered_json object = ordered_json::object();
  for (const auto& [name, points] : points_) {
    auto& curve = object[name];
    curve["points"] = thinned(points, kStretches);
    if (curve["points"].size() < points.size()) curve["means"] = means_of_stretches(points);
    curve["count"] = points.size();
    curve["last"] = in_json(last_.at(name));
    curve["mean"] = sum_of(points, 0, points.size()) / static_cast<double>(points.size());
    curve["median"] = median_of(points);
  }
  return object;
}

}  // namespace longhaul::train
