// Reads the folder of a run: what reports and comparisons start from.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

namespace longhaul::train {

struct RunFiles {
  std::string name;               // of the folder
  std::filesystem::path metrics;  // metrics.jsonl, which is there; for_each_step() reads it
  std::string job;                // job.toml; empty if it is not there
  nlohmann::ordered_json starts;  // of environment.json; an empty array if it is not there
};

// UserError if the folder or its metrics.jsonl is missing.
RunFiles read_run(const std::filesystem::path& folder);

}  // namespace longhaul::train
