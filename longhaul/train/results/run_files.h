// Reads the folder of a run: what reports and comparisons start from.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace longhaul::train {

struct RunFiles {
  std::string name;                    // of the folder
  std::vector<nlohmann::json> steps;   // of metrics.jsonl, in order
  std::string job;                     // job.toml; empty if it is not there
  nlohmann::ordered_json environment;  // environment.json; an empty object if it is not there
};

// UserError if the folder or its metrics.jsonl is missing or holds no step.
RunFiles read_run(const std::filesystem::path& folder);

}  // namespace longhaul::train
