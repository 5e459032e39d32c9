// For tests that kill a process which saves, at random instants.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <string>

#include "longhaul/checkpoint/checkpoint.h"

namespace longhaul::test {

// LONGHAUL_KILLS, if it is set.
inline int wanted_kills(int by_default) {
  const char* text = std::getenv("LONGHAUL_KILLS");
  return text == nullptr ? by_default : std::atoi(text);
}

// Whether a process that was killed has left a save unfinished: a hidden folder of a step that is
// newer than all checkpoints. One of an older step was being deleted.
inline bool was_saving(const std::filesystem::path& checkpoints) {
  const auto steps = checkpoint::list_steps(checkpoints);
  const int64_t newest = steps.empty() ? -1 : steps.front().step;
  std::error_code missing;
  for (const auto& entry : std::filesystem::directory_iterator(checkpoints, missing)) {
    const std::string name = entry.path().filename();
    if (!name.starts_with(".")) continue;
    if (checkpoint::step_of(name.substr(1, name.find(".tmp-") - 1)) > newest) return true;
  }
  return false;
}

}  // namespace longhaul::test
