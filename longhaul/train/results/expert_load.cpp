#include "longhaul/train/results/expert_load.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <numeric>
#include <optional>
#include <string>

namespace longhaul::train {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

// Nothing if the line is no longer whole: a run that goes on writes its last one anew.
std::optional<json> line_at(std::ifstream& in, int64_t place) {
  in.clear();
  in.seekg(place);
  std::string line;
  std::getline(in, line);
  json object = json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!object.is_object() || !object.contains("step") || !has_expert_load(object)) {
    return std::nullopt;
  }
  return object;
}

bool is_number_of_layer(const std::string& text) {
  constexpr size_t kMostDigits = 9;
  return !text.empty() && text.size() <= kMostDigits &&
         text.find_first_not_of("0123456789") == std::string::npos;
}

bool are_numbers(const json& values) {
  return values.is_array() && std::all_of(values.begin(), values.end(),
                                          [](const json& value) { return value.is_number(); });
}

// The layers of an expert_load object, by number.
std::vector<std::string> layers_of(const json& load) {
  std::vector<std::string> layers;
  for (const auto& [layer, counts] : load.items()) layers.push_back(layer);
  std::sort(layers.begin(), layers.end(),
            [](const auto& a, const auto& b) { return std::stoll(a) < std::stoll(b); });
  return layers;
}

// Each expert's load in percent of the mean of its layer.
std::vector<int64_t> load_in_percent(const json& by_layer, const std::vector<std::string>& layers) {
  std::vector<int64_t> percent;
  for (const auto& layer : layers) {
    const auto load = by_layer.at(layer).get<std::vector<double>>();
    const double sum = std::accumulate(load.begin(), load.end(), 0.0);
    const double scale = sum > 0 ? 100 * static_cast<double>(load.size()) / sum : 0;
    for (const double tokens : load) percent.push_back(std::llround(scale * tokens));
  }
  return percent;
}

}  // namespace

bool has_expert_load(const json& line) {
  const auto load = line.find("expert_load");
  if (load == line.end() || !load->is_object() || load->empty()) return false;
  const size_t experts = load->front().size();
  for (const auto& [layer, counts] : load->items()) {
    if (!is_number_of_layer(layer) || !are_numbers(counts) || counts.size() != experts) {
      return false;
    }
  }
  return experts > 0;
}

ordered_json expert_load(const std::filesystem::path& metrics, std::vector<int64_t> lines) {
  constexpr size_t kMostCells = 400'000, kMostFrames = 60;
  std::ifstream in(metrics);
  std::optional<json> last;
  while (!lines.empty() && !(last = line_at(in, lines.back()))) lines.pop_back();
  if (!last) return nullptr;
  const json& load = last->at("expert_load");
  const auto layers = layers_of(load);
  const size_t experts = load.at(layers.front()).size();
  const size_t cells = std::max<size_t>(layers.size() * experts, 1);
  const size_t most = std::clamp<size_t>(kMostCells / cells, 2, kMostFrames);
  const size_t frames = std::min(lines.size(), most);
  ordered_json object = {
      {"layers", layers}, {"experts", experts}, {"frames", ordered_json::array()}};
  for (size_t i = 0; i < frames; ++i) {
    const auto line = line_at(in, lines[frames == 1 ? 0 : i * (lines.size() - 1) / (frames - 1)]);
    if (!line || layers_of(line->at("expert_load")) != layers) continue;  // of another model
    object["frames"].push_back({{"step", line->at("step")},
                                {"percent", load_in_percent(line->at("expert_load"), layers)}});
  }
  return object;
}

}  // namespace longhaul::train
