#include "longhaul/train/results/report.h"

#include <fmt/format.h>

#include <algorithm>

#include "longhaul/base/error.h"
#include "longhaul/train/metrics.h"
#include "longhaul/train/results/curves.h"
#include "longhaul/train/results/expert_load.h"
#include "longhaul/train/results/report_assets.h"

namespace longhaul::train {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

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
void add_by_layer(const json& line, const char* key, int64_t step, Curves& curves) {
  if (!line.contains(key) || !line[key].is_array()) return;
  for (size_t layer = 0; layer < line[key].size(); ++layer) {
    curves.add(std::to_string(layer), step, line[key][layer]);
  }
}

// What is gathered over the lines of a metrics.jsonl.
struct Gathered {
  int64_t lines = 0, last_step = 0, tokens = 0;
  std::vector<int64_t> skipped, lines_with_load;
  Curves figures, seconds, memory, indexer_loss, indexer_recall;

  void add(const json& line, int64_t place) {
    const auto step = line.at("step").get<int64_t>();
    lines += 1;
    last_step = step;
    if (line.contains("tokens") && line["tokens"].is_number_integer()) {
      tokens = line["tokens"].get<int64_t>();
    }
    for (const char* key : kFigures) {
      if (line.contains(key)) figures.add(key, step, line[key]);
    }
    add_numbers(line, "seconds", step, seconds);
    add_numbers(line, "memory", step, memory);
    if (line.contains("memory_peak_bytes")) memory.add("peak", step, line["memory_peak_bytes"]);
    add_by_layer(line, "indexer_loss_per_layer", step, indexer_loss);
    add_by_layer(line, "indexer_recall_per_layer", step, indexer_recall);
    if (line.contains("skipped")) skipped.push_back(step);
    if (has_expert_load(line)) lines_with_load.push_back(place);
  }
};

// Inside of a script element, where "</" would end it.
std::string safe_json(const ordered_json& value) {
  std::string text, dumped = value.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
  for (const char c : dumped) c == '<' ? text += "\\u003c" : text += c;
  return text;
}

}  // namespace

ordered_json report_data(const RunFiles& run) {
  Gathered all;
  for_each_step(run.metrics, [&](const json& line, int64_t place) { all.add(line, place); });
  if (all.lines == 0) fail_user("'{}' holds no step yet", run.metrics.string());
  return {{"name", run.name},
          {"job", run.job},
          {"starts", run.starts},
          {"lines", all.lines},
          {"steps", all.last_step},
          {"tokens", all.tokens},
          {"skipped", all.skipped},
          {"figures", all.figures.to_json()},
          {"by_layer",
           {{"indexer_loss", all.indexer_loss.to_json()},
            {"indexer_recall", all.indexer_recall.to_json()}}},
          {"seconds", all.seconds.to_json()},
          {"memory", all.memory.to_json()},
          {"expert_load", expert_load(run.metrics, all.lines_with_load)}};
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
