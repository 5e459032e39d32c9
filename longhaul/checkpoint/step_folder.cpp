#include "longhaul/checkpoint/step_folder.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <string_view>

#include "longhaul/base/fault.h"
#include "longhaul/base/log.h"
#include "longhaul/checkpoint/checkpoint.h"

namespace longhaul::checkpoint {
namespace {

fs::path hidden_name(const fs::path& step_folder) { return temporary_name(step_folder); }

// The process id in `.step-<N>.tmp-<pid>` or `.step-<N>.tmp-<pid>-old`; empty for any other name.
std::string owner_of(std::string_view name) {
  const auto skip = [&name](std::string_view text) {
    const bool there = name.starts_with(text);
    if (there) name.remove_prefix(text.size());
    return there;
  };
  const auto digits = [&name] {
    const std::string_view found = name.substr(0, name.find_first_not_of("0123456789"));
    name.remove_prefix(found.size());
    return found;
  };
  if (!skip(".step-") || digits().empty() || !skip(".tmp-")) return "";
  const std::string pid(digits());
  skip("-old");
  return name.empty() ? pid : "";
}

bool process_lives(const std::string& pid_text) {
  pid_t pid = 0;
  std::from_chars(pid_text.data(), pid_text.data() + pid_text.size(), pid);
  return pid > 0 && (::kill(pid, 0) == 0 || errno == EPERM);
}

// A lock dies with its process, whatever happens to process ids. Where folders cannot be locked
// (NFS), the process id in the name decides.
bool is_stale(const fs::path& path, const std::string& pid) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return false;
  const FileDescriptor owner(fd);
  if (::flock(fd, LOCK_EX | LOCK_NB) == 0) return true;
  return errno != EWOULDBLOCK && !process_lives(pid);
}

void rename_or_fail(const fs::path& from, const fs::path& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) fail_file("rename to", to, errno);
}

// Leaves what was at `final_path` at `path`.
void exchange(const fs::path& path, const fs::path& final_path) {
  if (::renameat2(AT_FDCWD, path.c_str(), AT_FDCWD, final_path.c_str(), RENAME_EXCHANGE) == 0) {
    return;
  }
  if (errno != EINVAL && errno != ENOSYS) fail_file("rename to", final_path, errno);
  const fs::path aside = path.string() + "-old";
  rename_or_fail(final_path, aside);
  if (::rename(path.c_str(), final_path.c_str()) != 0) {
    const int code = errno;
    rename_or_fail(aside, final_path);
    fail_file("rename to", final_path, code);
  }
  rename_or_fail(aside, path);
}

}  // namespace

void remove_logged(const fs::path& path) {
  std::error_code error;
  fs::remove_all(path, error);
  if (error) log::warn("cannot remove '{}': {}", path.string(), error.message());
}

void take_name(const fs::path& path, const fs::path& final_path) {
  std::error_code ignored;
  if (fs::exists(fs::symlink_status(final_path, ignored))) {
    exchange(path, final_path);
  } else {
    rename_or_fail(path, final_path);
  }
}

TemporaryStep::TemporaryStep(const fs::path& folder, int64_t step)
    : final_path_(step_path(folder, step)), path_(hidden_name(final_path_)) {
  std::error_code error;
  if (!fs::create_directory(path_, error)) {
    fail_file("create the folder", path_, error ? error.value() : EEXIST);
  }
  lock_ = open_file(path_, O_RDONLY | O_DIRECTORY, "open the folder");
  ::flock(lock_.get(), LOCK_EX | LOCK_NB);
}

TemporaryStep::~TemporaryStep() {
  std::error_code ignored;
  if (fs::exists(path_, ignored)) remove_logged(path_);
}

void TemporaryStep::publish() {
  fault::at("checkpoint.rename");
  take_name(path_, final_path_);
  fault::at("checkpoint.renamed");
  sync_folder(final_path_.parent_path());
}

void remove_step(const fs::path& step_folder) {
  const fs::path hidden = hidden_name(step_folder);
  fault::at("checkpoint.purge");
  remove_logged(hidden);
  rename_or_fail(step_folder, hidden);
  fault::at("checkpoint.purged");
  remove_logged(hidden);
}

void remove_stale(const fs::path& folder) {
  std::error_code error;
  std::vector<fs::path> stale;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    const std::string pid = owner_of(entry.path().filename().string());
    if (!pid.empty() && is_stale(entry.path(), pid)) stale.push_back(entry.path());
  }
  for (const auto& path : stale) {
    log::info("removing '{}', which an interrupted save has left", path.string());
    remove_logged(path);
  }
}

}  // namespace longhaul::checkpoint
