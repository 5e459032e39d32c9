// The life of a step folder on disk: preparing under a hidden name, taking the final name, and
// clearing away what died. Called by save() and purge(); what holds for any folder, by hf_writer,
// too.
#pragma once

#include "longhaul/base/file.h"

namespace longhaul::checkpoint {

// `<folder>/.step-<N>.tmp-<pid>`, locked while this object lives, so that nobody takes a save in
// progress for a dead one. Removed with the object, unless published.
class TemporaryStep {
 public:
  TemporaryStep(const fs::path& folder, int64_t step);
  TemporaryStep(const TemporaryStep&) = delete;
  ~TemporaryStep();

  const fs::path& path() const { return path_; }
  // Gives it the final name; what had that name is removed.
  void publish();

 private:
  fs::path final_path_;
  fs::path path_;
  FileDescriptor lock_;
};

// Gives the folder at `path` the name `final_path`; what had that name is left at `path`, in one
// move where the file system can exchange two folders.
void take_name(const fs::path& path, const fs::path& final_path);

// Deletes a folder; a warning says what cannot be deleted.
void remove_logged(const fs::path& path);

// Deletes a step folder so that at no time a part of it is under its name.
void remove_step(const fs::path& step_folder);

// Removes the temporaries in `folder` that no living process works on.
void remove_stale(const fs::path& folder);

}  // namespace longhaul::checkpoint
