// environment.json of a run folder: what the run ran on, at each of its starts. Written by the run;
// read by `longhaul report`. What stands in it is results/environment.h's.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>

namespace longhaul::train {

// The objects under "starts", in order; an empty array if the file is missing or is another one.
nlohmann::ordered_json read_starts(const std::filesystem::path& path);

// Adds the start of a run that goes on after `last_step` (0: one that begins), with `first_step`
// and `time` (seconds since 1970). Starts whose first step is taken again go, as their lines of the
// metrics do.
void add_start(const std::filesystem::path& path, int64_t last_step,
               const nlohmann::ordered_json& environment);

}  // namespace longhaul::train
