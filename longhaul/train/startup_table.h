// What a run is about, in one table before its first step: so that a wrong setting is seen at once.
#pragma once

#include <string>

#include "longhaul/train/trainer.h"

namespace longhaul::train {

// Parameters total and active, memory by kind, tokens a step, what is on and what is off.
std::string startup_table(const JobConfig& config, const ResolvedModel& resolved, Trainer& trainer);

}  // namespace longhaul::train
