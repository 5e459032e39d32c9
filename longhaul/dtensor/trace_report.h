// What the traces of a job's ranks say together: in which collective each rank was, and the first
// one that not all of its ranks began. Called by `longhaul comm show` and by the launcher.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "longhaul/dtensor/flight_recorder.h"

namespace longhaul::dtensor {

// The collective that the rank was in: the one that failed, or else the one under way that it began
// first; null where it was in none.
const TracedCollective* current_of(const Trace& trace);

// "rank 0 was in all_reduce #7 on axis loss (...); rank 1 in none, the last was ...", ranks of
// which there is no trace included.
std::string positions_text(const std::vector<Trace>& traces);

// The first collective, by the time at which it began, that its ranks do not agree on: some have
// not begun it, left no trace, or began another one in its place. Empty if there is none.
std::string difference_text(const std::vector<Trace>& traces);

// A line for each rank, and the difference.
std::string report_table(const std::vector<Trace>& traces);

// The last `count` collectives of one rank, a line each.
std::string records_table(const Trace& trace, size_t count);

}  // namespace longhaul::dtensor
