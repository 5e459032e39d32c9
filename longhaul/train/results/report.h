// One self-contained HTML page about one or more runs: figures by step, the load of the experts,
// memory, time, configuration and environment. Reads run folders only; the page wants no network.
// Called by `longhaul report`. The page itself is report.css and report/*.js beside this file,
// which CMake puts into the program.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "longhaul/train/results/run_files.h"

namespace longhaul::train {

// UserError if a folder is no run.
std::string report_page(const std::vector<std::filesystem::path>& runs);

// What the page draws of a run; curves are those of results/curves.h. UserError if it has no step.
//   name, job, starts: as in RunFiles
//   lines: of the metrics; steps: the last one; tokens; skipped: [step, ...]
//   figures:  {"lm_loss": curve, ...}
//   by_layer: {"indexer_loss": {"0": curve, ...}, "indexer_recall": {...}}
//   seconds:  {"forward": curve, ...},  memory: {"weights": curve, ...} in bytes
//   expert_load: see results/expert_load.h
nlohmann::ordered_json report_data(const RunFiles& run);

}  // namespace longhaul::train
