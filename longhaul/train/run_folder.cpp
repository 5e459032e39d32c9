#include "longhaul/train/run_folder.h"

#include <fcntl.h>
#include <sys/file.h>

#include <cerrno>

#include "longhaul/base/error.h"

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

}  // namespace longhaul::train
