// summary.md and loss.svg of a run folder: what one looks at first. Written from the files of the
// folder alone (job.toml, metrics.jsonl, evaluation.json), so it can be made again at any time.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace longhaul::train {

void write_summary(const std::filesystem::path& run_folder);

struct Curve {
  std::string name;
  std::vector<std::pair<double, double>> points;  // (step, value), finite
};

// A line plot as one self-contained SVG.
std::string plot_svg(const std::vector<Curve>& curves, const std::string& x_label,
                     const std::string& y_label);

}  // namespace longhaul::train
