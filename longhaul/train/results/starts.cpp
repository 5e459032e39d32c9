#include "longhaul/train/results/starts.h"

#include "longhaul/base/clock.h"
#include "longhaul/base/file.h"

namespace longhaul::train {

using nlohmann::ordered_json;

ordered_json read_starts(const std::filesystem::path& path) {
  ordered_json starts = ordered_json::array();
  if (!std::filesystem::exists(path)) return starts;
  const auto file = ordered_json::parse(read_file(path), nullptr, /*allow_exceptions=*/false);
  if (!file.is_object() || !file.contains("starts") || !file["starts"].is_array()) return starts;
  for (const auto& start : file["starts"]) {
    if (start.is_object()) starts.push_back(start);
  }
  return starts;
}

void add_start(const std::filesystem::path& path, int64_t last_step,
               const ordered_json& environment) {
  ordered_json starts = ordered_json::array();
  for (const auto& start : read_starts(path)) {
    const auto first = start.find("first_step");
    if (first != start.end() && first->is_number_integer() && *first <= last_step) {
      starts.push_back(start);
    }
  }
  ordered_json start = {{"first_step", last_step + 1}, {"time", seconds_since_1970()}};
  start.update(environment);
  starts.push_back(start);
  // A name of the machine's need not be UTF-8, and no run ends for that.
  constexpr auto kReplace = ordered_json::error_handler_t::replace;
  write_atomic(path, ordered_json{{"starts", starts}}.dump(2, ' ', false, kReplace) + "\n");
}

}  // namespace longhaul::train
