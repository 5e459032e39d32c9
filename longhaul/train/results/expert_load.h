// The load of the experts over a run as the report's page gets it. Called by results/report.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <vector>

namespace longhaul::train {

// Whether a line of metrics.jsonl has `expert_load` in the form that a run writes: by number of the
// layer an array of numbers, all of one size.
bool has_expert_load(const nlohmann::json& line);

// Of a metrics.jsonl's lines that have it, which begin at the bytes `lines`, as many as keep the
// page small, the first and the last among them: {layers: [...], experts: E, frames: [{step,
// percent: [of the mean of its layer, by layer and expert]}, ...]}. Null without any. Lines that
// have changed since are left out.
nlohmann::ordered_json expert_load(const std::filesystem::path& metrics,
                                   std::vector<int64_t> lines);

}  // namespace longhaul::train
