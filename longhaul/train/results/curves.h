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
  // Steps in ascending order. No point is drawn of a value that is not finite, or no number.
  void add(const std::string& name, int64_t step, const nlohmann::json& value);

  // By name, each with at least one point:
  //   points: [[step, value], ...], about 2000 at most, with the first, the last and all extremes
  //   means:  [[step, mean], ...] of 1000 stretches, where points were left out: a fair sample
  //   count, mean, median: of all points
  //   last: the last value, "nan", "inf" or "-inf" where it is not finite
  nlohmann::ordered_json to_json() const;

 private:
  std::map<std::string, std::vector<std::pair<int64_t, double>>> points_;
  std::map<std::string, double> last_;
};

}  // namespace longhaul::train
