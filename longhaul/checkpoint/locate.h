// Which checkpoint a path of the user's means; a damaged folder is still located. Called by
// open_source() and verify(), and by train/ to open weights.
#pragma once

#include "longhaul/checkpoint/checkpoint.h"

namespace longhaul::checkpoint {

struct Located {
  fs::path path;
  bool ours = false;  // a step folder, not Hugging Face's files
};

// Of a folder of steps the newest whose manifest says the step that its name does. UserError if
// there is nothing of the kind.
Located locate(const fs::path& path);

}  // namespace longhaul::checkpoint
