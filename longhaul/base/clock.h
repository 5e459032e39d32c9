// What time it is, in seconds. Anybody may call it.
#pragma once

#include <chrono>

namespace longhaul {

// On the clock that is never set.
inline double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

inline double seconds_since_1970() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace longhaul
