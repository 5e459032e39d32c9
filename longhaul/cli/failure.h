// How a command ends badly: what an exception says to a user (one line, without libtorch's
// backtrace), and output that was lost. Called by main.
#pragma once

#include <exception>
#include <string>

namespace longhaul::cli {

std::string one_line(const std::exception& error);

// Error if what a command printed did not arrive, so that a full disk does not look like
// success.
void flush_standard_output();

}  // namespace longhaul::cli
