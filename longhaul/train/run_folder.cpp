#include "longhaul/train/run_folder.h"

#include <fcntl.h>
#include <sys/file.h>

#include <cerrno>

#include "longhaul/base/error.h"
#include "longhaul/train/resume.h"

namespace longhaul::train {
namespace {

FileDescriptor claim(const fs::path& folder) {
  if (folder.empty()) fail_user("it is empty; name the folder that the run may write to");
  create_folders(folder);
  FileWriter(temporary_name(folder / "probe")).write("probe");  // goes with the writer
  FileDescriptor claimed = open_file(folder, O_RDONLY | O_DIRECTORY, "open the folder");
  if (::flock(claimed.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    fail_user("another run is writing to '{}'; stop it, or choose another folder", folder.string());
  }
  return claimed;
}

}  // namespace

FileDescriptor claim_run_folder(const JobConfig& config) {
  return name_setting(config, "job.dump_folder", [&] { return claim(config.job.dump_folder); });
}

FileDescriptor claim_checkpoint_folder(const JobConfig& config) {
  const fs::path folder = fs::weakly_canonical(checkpoint_folder(config));
  const fs::path below = folder.lexically_relative(fs::weakly_canonical(config.job.dump_folder));
  if (!below.empty() && *below.begin() != "..") return {};
  return name_setting(config, "checkpoint.folder", [&] { return claim(folder); });
}

}  // namespace longhaul::train
