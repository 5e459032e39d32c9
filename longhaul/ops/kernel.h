// Which implementation of an operator computes. The reference (plain ATen) defines the operator and
// runs everywhere; a fused kernel is faster, needs less memory and may not cover a case.
#pragma once

#include <string>

namespace longhaul::ops {

enum class Kernel { kReference, kFused };

// Says, once in a process for each text, that the reference runs although the fused kernel was
// asked for. `reason` completes "...: ".
void report_fallback(const std::string& op, const std::string& reason);

}  // namespace longhaul::ops
