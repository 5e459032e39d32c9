// What the ranks of a mesh axis talk over, as the choice of sharding strategies and the order of
// redistribution price it. Orders of magnitude of the hardware in use, not measurements: only which
// way is cheaper depends on them, never a number of the model.
#pragma once

namespace longhaul::dtensor {

struct Link {
  double latency_us;    // of a collective
  double bytes_per_us;  // that a rank sends

  bool operator==(const Link&) const = default;
};

// NVLink, HCCS or shared memory.
inline constexpr Link kWithinHost{.latency_us = 10, .bytes_per_us = 50'000};
// A network card of 100 Gb/s a rank.
inline constexpr Link kAcrossHosts{.latency_us = 30, .bytes_per_us = 12'500};

}  // namespace longhaul::dtensor
