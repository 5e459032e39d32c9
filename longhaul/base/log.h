// The logger: lines for people, on stderr; what a program reads goes to files or stdout.
// Anybody may call it. Colour only on a terminal and without NO_COLOR.
#pragma once

#include <spdlog/spdlog.h>

#include <string_view>

namespace longhaul::log {

using spdlog::error;
using spdlog::info;
using spdlog::warn;

// Sets the pattern and colours of the process's logger. Called once, by main.
void configure(bool color);

}  // namespace longhaul::log
