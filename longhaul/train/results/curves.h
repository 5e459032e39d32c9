// Figures by step as the report's page gets them: few enough points to draw, and what is computed
// of all of them. Called by results/report.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

namespace longhaul::train {

class Curves {
 public:
  // Steps in ascending order. A value that is not finite, or no number, is left out.
  void add(const std::string& name, int64_t step, const nlohmann::json& value);

  // By name, each with at least one value:
  //   points: [[step, value], ...], about 2000 at most, with the first, the last and all extremes
  //   means:  [[step, mean], ...] of 1000 stretches, where points were left out: a fair sample
  //   count, last, mean, median: of all values
  nlohmann::ordered_json to_json() const;

 private:
  std::map<std::string, std::vector<std::pair<int64_t, double>>> points_;
};

}  // namespace longhaul::train
