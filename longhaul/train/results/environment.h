// What a run ran on, for whoever reads its results later: environment.json of the run folder.
// Written by the run; read by `longhaul report`. `longhaul version` prints some of it.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "longhaul/config/degrees.h"

namespace longhaul::train {

// The compiler that made this program, "gcc 12.2.0".
std::string compiler_text();
// The commit that this program was configured from, as `git describe --always --dirty` says it;
// empty if that is not known.
std::string git_text();

// Versions, CPU, memory, kernels, the layout of the ranks. `device` is the run's, as text.
nlohmann::ordered_json environment(const std::string& device, const Degrees& degrees);

}  // namespace longhaul::train
