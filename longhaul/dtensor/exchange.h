// What ranks tell each other beside tensors: a number, a line of text. Each call is a collective,
// or two, over the whole group.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "longhaul/dtensor/communicator.h"

namespace longhaul::dtensor {

// The ranks' values, reduced. No average of integers.
int64_t reduce_number(const Communicator& group, int64_t value, Reduction reduction);

// What each rank says, rank after rank; every rank gets all of it. Any bytes, of any length.
std::vector<std::string> gather_text(const Communicator& group, const std::string& text);

}  // namespace longhaul::dtensor
