// What the operating system tells about this process and machine.
#pragma once

#include <cstdint>

namespace longhaul {

// The largest resident set of this process so far, in bytes.
int64_t peak_memory_bytes();

// Physical memory of the machine, in bytes.
int64_t machine_memory_bytes();

}  // namespace longhaul
