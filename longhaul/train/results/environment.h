// What a run runs on, for whoever reads its results later: a start in environment.json
// (results/starts.h). `longhaul version` prints some of it.
#pragma once

#include <c10/core/Device.h>

#include <nlohmann/json.hpp>
#include <string>

#include "longhaul/config/degrees.h"

namespace longhaul::train {

// The compiler that made this program, "gcc 12.2.0".
std::string compiler_text();
// The commit that was checked out when CMake last configured this build, as `git describe --always
// --dirty` says it; empty if that is not known. What was edited since is not in it.
std::string git_text();

// Versions, host, CPU, GPUs, memory, kernels, the layout of the ranks. `device` is the run's.
nlohmann::ordered_json environment(at::Device device, const Degrees& degrees);

}  // namespace longhaul::train
