// The life of a folder on disk that is complete or absent: preparing under a hidden name, taking
// the final name, and clearing away what died. Called by save(), purge() and write_hf_folder().
#pragma once

#include <functional>
#include <string>

#include "longhaul/base/file.h"

namespace longhaul::checkpoint {

// While it lives, remove_stale() in this process takes that path for one that is worked on.
class Held {
 public:
  explicit Held(fs::path path);
  Held(const Held&) = delete;
  ~Held();
  const fs::path& path() const { return path_; }

 private:
  const fs::path path_;
};

// `.<name>.tmp-<pid>` beside the folder <name> that it becomes, locked while this object lives, so
// that nobody takes it for one that a process has left. Removed with the object, unless it is left.
class TemporaryFolder {
 public:
  // Creates it, and the folders above it.
  explicit TemporaryFolder(fs::path final_path);
  TemporaryFolder(const TemporaryFolder&) = delete;
  ~TemporaryFolder();

  const fs::path& path() const { return held_.path(); }
  // Gives it the final name, durably; what had that name is removed with this object.
  void publish();
  // It stays when the object goes, because other ranks may still write into it. A later save clears
  // it away.
  void leave() { left_ = true; }

 private:
  const fs::path final_path_;
  const Held held_;
  FileDescriptor lock_;
  bool left_ = false;
};

// Deletes a step folder so that at no time a part of it is under its name.
void remove_step(const fs::path& step_folder);

// Removes the temporaries in `folder` that no living process works on, of the final names that are
// asked for. A folder that was moved aside for another, which did not come, gets its name back.
void remove_stale(const fs::path& folder,
                  const std::function<bool(const std::string& final_name)>& is_asked_for);

}  // namespace longhaul::checkpoint
