#include "longhaul/train/results/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include "longhaul/base/error.h"
#include "longhaul/train/metrics.h"
#include "longhaul/train/results/report_assets.h"

namespace longhaul::train {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;
using Points = std::vector<std::pair<int64_t, double>>;

// Of each stretch of points the least and the most, in their order: what is left out lies between.
Points thinned(const Points& points) {
  constexpr size_t kStretches = 1000;
  if (points.size() <= 2 * kStretches) return points;
  Points kept;
  for (size_t i = 0; i < kStretches; ++i) {
    const auto at = [&](size_t part) {
      return points.begin() + static_cast<std::ptrdiff_t>(part * points.size() / kStretches);
    };
    const auto [least, most] = std::minmax_element(
        at(i), at(i + 1), [](const auto& a, const auto& b) { return a.second < b.second; });
    kept.push_back(*std::min(least, most));
    if (least != most) kept.push_back(*std::max(least, most));
  }
  return kept;
}

class Curves {
 public:
  void add(const std::string& name, int64_t step, const json& value) {
    const double number = number_from(value);
    if (std::isfinite(number)) points_[name].emplace_back(step, number);
  }
  ordered_json take() const {
    ordered_json object = ordered_json::object();
    for (const auto& [name, points] : points_) object[name] = thinned(points);
    return object;
  }

 private:
  std::map<std::string, Points> points_;
};

constexpr const char* kFigures[] = {
    "loss",           "lm_loss", "mtp_loss",          "indexer_loss",
    "balance_loss",   "z_loss",  "validation_loss",   "validation_bits_per_byte",
    "grad_norm",      "lr",      "tokens_per_second", "mfu",
    "comm_wait_share"};

void add_numbers(const json& line, const char* key, int64_t step, Curves& curves) {
  if (!line.contains(key) || !line[key].is_object()) return;
  for (const auto& [name, value] : line[key].items()) curves.add(name, step, value);
}

// Arrays have a value a layer.
Curves by_layer(const std::vector<json>& steps, const char* key) {
  Curves curves;
  for (const auto& line : steps) {
    if (!line.contains(key) || !line[key].is_array()) continue;
    for (size_t layer = 0; layer < line[key].size(); ++layer) {
      // Two digits at least, so that the names sort as the numbers do.
      curves.add(fmt::format("{:02}", layer), line["step"].get<int64_t>(), line[key][layer]);
    }
  }
  return curves;
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

// The layers of an expert_load object, by number.
std::vector<std::string> layers_of(const json& load) {
  std::vector<std::string> layers;
  for (const auto& [layer, counts] : load.items()) layers.push_back(layer);
  std::sort(layers.begin(), layers.end(),
            [](const auto& a, const auto& b) { return std::stoll(a) < std::stoll(b); });
  return layers;
}

// As many steps of it as keep the page small.
ordered_json expert_load(const std::vector<json>& steps) {
  constexpr size_t kMostCells = 400'000, kMostFrames = 60;
  std::vector<const json*> lines;
  for (const auto& line : steps) {
    if (line.contains("expert_load")) lines.push_back(&line);
  }
  if (lines.empty()) return nullptr;
  const auto layers = layers_of(lines.back()->at("expert_load"));
  const size_t experts = lines.back()->at("expert_load").at(layers.front()).size();
  const size_t cells = std::max<size_t>(layers.size() * experts, 1);
  const size_t most = std::clamp<size_t>(kMostCells / cells, 2, kMostFrames);
  const size_t frames = std::min(lines.size(), most);
  ordered_json object = {
      {"layers", layers}, {"experts", experts}, {"frames", ordered_json::array()}};
  for (size_t i = 0; i < frames; ++i) {
    const size_t at = frames == 1 ? 0 : i * (lines.size() - 1) / (frames - 1);
    const json& line = *lines[at];
    if (layers_of(line["expert_load"]) != layers) continue;  // of another model
    object["frames"].push_back(
        {{"step", line["step"]}, {"percent", load_in_percent(line["expert_load"], layers)}});
  }
  return object;
}

// Inside of a script element, where "</" would end it.
std::string safe_json(const ordered_json& value) {
  std::string text, dumped = value.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
  for (const char c : dumped) c == '<' ? text += "\\u003c" : text += c;
  return text;
}

}  // namespace

ordered_json report_data(const RunFiles& run) {
  Curves figures, seconds, memory;
  std::vector<int64_t> skipped;
  for (const auto& line : run.steps) {
    const auto step = line.at("step").get<int64_t>();
    for (const char* key : kFigures) {
      if (line.contains(key)) figures.add(key, step, line[key]);
    }
    add_numbers(line, "seconds", step, seconds);
    add_numbers(line, "memory", step, memory);
    if (line.contains("memory_peak_bytes")) memory.add("peak", step, line["memory_peak_bytes"]);
    if (line.contains("skipped")) skipped.push_back(step);
  }
  const json& last = run.steps.back();
  return {{"name", run.name},
          {"job", run.job},
          {"environment", run.environment},
          {"steps", last["step"]},
          {"tokens", last.contains("tokens") ? last["tokens"] : json(0)},
          {"skipped", skipped},
          {"figures", figures.take()},
          {"by_layer",
           {{"indexer_loss", by_layer(run.steps, "indexer_loss_per_layer").take()},
            {"indexer_recall", by_layer(run.steps, "indexer_recall_per_layer").take()}}},
          {"seconds", seconds.take()},
          {"memory", memory.take()},
          {"expert_load", expert_load(run.steps)}};
}

std::string report_page(const std::vector<std::filesystem::path>& folders) {
  if (folders.empty()) fail_user("no run to report on; name the job.dump_folder of one");
  ordered_json runs = ordered_json::array();
  for (const auto& folder : folders) {
    runs.push_back(report_data(read_run(folder)));
    // Two folders may have one name: then the paths tell them apart.
    const auto same = [&](const auto& other) { return other["name"] == runs.back()["name"]; };
    if (std::count_if(runs.begin(), runs.end(), same) > 1) runs.back()["name"] = folder.string();
  }
  return fmt::format(
      "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
      "<title>Training report</title>\n<style>\n{}</style>\n</head>\n<body>\n"
      "<main id=\"page\"></main>\n"
      "<noscript>This page draws its curves with JavaScript, all of which is in it.</noscript>\n"
      "<script type=\"application/json\" id=\"runs\">{}</script>\n"
      "<script>\n{}</script>\n</body>\n</html>\n",
      kReportStyle, safe_json(runs), kReportScript);
}

}  // namespace longhaul::train
