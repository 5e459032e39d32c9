// What ranks tell each other beside tensors: a number, a line of text. Each call is a collective,
// or two, over the whole group.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "longhaul/dtensor/communicator.h"

namespace longhaul::dtensor {

// The ranks' values, reduced. No average of integers.
int64_t reduce_number(const Communicator& group, int64_t value, Reduction reduction);

// What each rank says, rank after rank; every rank gets all of it. Any bytes, of any length.
std::vector<std::string> gather_text(const Communicator& group, const std::string& text);

// Runs a step on each rank and returns what each made of it, rank after rank. If it failed on any,
// all throw: those where it did their own exception, the others a UserError with what the first of
// those says. Other ranks that cannot be reached (CollectiveError) are told nothing. Null: this
// rank alone.
std::vector<std::string> together(const Communicator* ranks,
                                  const std::function<std::string()>& step);

}  // namespace longhaul::dtensor
