#include "longhaul/dtensor/placement.h"

#include <fmt/format.h>

#include <algorithm>

namespace longhaul::dtensor {

std::string Placement::text() const {
  constexpr const char* kReductions[] = {"sum", "avg", "max", "min"};
  if (is_shard()) return fmt::format("Shard({})", dim());
  if (is_replicate()) return "Replicate";
  return fmt::format("Partial({})", kReductions[static_cast<int>(reduction_)]);
}

std::string text_of(const Placements& placements) {
  std::string text;
  for (const auto& placement : placements) {
    text += (text.empty() ? "" : ", ") + placement.text();
  }
  return "(" + text + ")";
}

Slice slice_of(int64_t total, int64_t pieces, int64_t index) {
  const int64_t piece = (total + pieces - 1) / pieces;
  const int64_t start = std::min(total, index * piece);
  return {start, std::min(total, start + piece) - start};
}

}  // namespace longhaul::dtensor
