#include "longhaul/train/summary.h"

#include <fmt/format.h>

#include <cmath>

#include "longhaul/base/file.h"
#include "longhaul/base/text.h"
#include "longhaul/train/metrics.h"
#include "longhaul/train/run_folder.h"

namespace longhaul::train {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

Curve curve_of(const std::vector<json>& metrics, const std::string& key, const std::string& name) {
  Curve curve{name, {}};
  for (const auto& object : metrics) {
    if (!object.contains(key)) continue;
    const double value = number_from(object[key]);
    if (std::isfinite(value)) curve.points.emplace_back(object["step"].get<double>(), value);
  }
  return curve;
}

std::string figure(const json& object, const char* key, const char* format) {
  if (!object.contains(key)) return "-";
  return fmt::format(fmt::runtime(format), number_from(object[key]));
}

std::string row(const std::string& name, const json& first, const json& last, const char* key,
                const char* format) {
  return fmt::format("| {} | {} | {} |\n", name, figure(first, key, format),
                     figure(last, key, format));
}

double number_or_zero(const json& object, const char* key) {
  const double value = object.contains(key) ? number_from(object[key]) : 0;
  return std::isfinite(value) ? value : 0;
}

double mean_speed(const std::vector<json>& metrics) {
  double sum = 0;
  for (const auto& object : metrics) sum += number_or_zero(object, "tokens_per_second");
  return sum / static_cast<double>(metrics.size());
}

// The first and the last object that hold a validation loss.
std::string validation_rows(const std::vector<json>& metrics) {
  const json *first = nullptr, *last = nullptr;
  for (const auto& object : metrics) {
    if (!object.contains("validation_loss")) continue;
    if (first == nullptr) first = &object;
    last = &object;
  }
  if (first == nullptr) return "";
  return row("validation loss", *first, *last, "validation_loss", "{:.4f}") +
         row("validation bits per byte", *first, *last, "validation_bits_per_byte", "{:.3f}");
}

std::string evaluation_table(const fs::path& path) {
  if (!fs::exists(path)) return "";
  const json evaluation = json::parse(read_file(path), nullptr, false);
  if (!evaluation.is_object() || !evaluation.contains("models")) return "";
  std::string text =
      "\n## Held-out data\n\n| model | loss | bits per byte |\n| --- | --- | --- |\n";
  for (const auto& entry : evaluation["models"]) {
    if (!entry.is_object() || !entry.contains("name") || !entry["name"].is_string()) continue;
    text += fmt::format("| {} | {} | {} |\n", entry["name"].get<std::string>(),
                        figure(entry, "loss", "{:.4f}"), figure(entry, "bits_per_byte", "{:.3f}"));
  }
  return text;
}

}  // namespace

void write_summary(const fs::path& run_folder) {
  const auto metrics = read_metrics(run_folder / "metrics.jsonl");
  if (metrics.empty()) return;
  const json &first = metrics.front(), &last = metrics.back();
  std::string text = "# Training run\n\n";
  text += fmt::format(
      "{} steps, {} tokens, {} tokens/s on average. The job: [job.toml](job.toml).\n\n",
      last["step"].get<int64_t>(), with_commas(std::llround(number_or_zero(last, "tokens"))),
      with_commas(std::llround(mean_speed(metrics))));
  text += "![loss by step](loss.svg)\n\n| | first step | last step |\n| --- | --- | --- |\n";
  text += row("loss (objective)", first, last, "loss", "{:.4f}");
  text += row("language model loss", first, last, "lm_loss", "{:.4f}");
  text += row("indexer loss (mean over layers)", first, last, "indexer_loss", "{:.3g}");
  text += row("gradient norm", first, last, "grad_norm", "{:.3f}");
  text += row("tokens/s", first, last, "tokens_per_second", "{:.0f}");
  text += validation_rows(metrics);
  if (fs::exists(run_folder / kBadDocuments)) {
    text += fmt::format("\nDocuments that were bad and left out: [{0}]({0}).\n", kBadDocuments);
  }
  text += evaluation_table(run_folder / "evaluation.json");

  std::vector<Curve> curves = {curve_of(metrics, "lm_loss", "training")};
  const Curve validation = curve_of(metrics, "validation_loss", "validation");
  if (!validation.points.empty()) curves.push_back(validation);
  write_atomic(run_folder / "loss.svg", plot_svg(curves, "step", "loss (nats per token)"));
  write_atomic(run_folder / "summary.md", text);
}

}  // namespace longhaul::train
