#include "longhaul/checkpoint/step_folder.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "longhaul/base/fault.h"
#include "longhaul/base/log.h"

namespace longhaul::checkpoint {
namespace {

fs::path parent_of(const fs::path& path) {
  return path.has_parent_path() ? path.parent_path() : fs::path(".");
}

void remove_logged(const fs::path& path) {
  std::error_code error;
  fs::remove_all(path, error);
  if (error) log::warn("cannot remove '{}': {}", path.string(), error.message());
}

// Of a hidden folder `.<name>.tmp-<pid>` or `.<name>.tmp-<pid>-old`.
struct Hidden {
  std::string final_name, pid;
  bool old = false;
};

std::optional<Hidden> parse_hidden(std::string_view name) {
  constexpr std::string_view kTemporary = ".tmp-", kOld = "-old";
  const bool old = name.ends_with(kOld);
  if (old) name.remove_suffix(kOld.size());
  const size_t at = name.rfind(kTemporary);
  if (!name.starts_with(".") || at == std::string_view::npos || at < 2) return std::nullopt;
  const std::string_view pid = name.substr(at + kTemporary.size());
  if (pid.empty() || pid.find_first_not_of("0123456789") != std::string_view::npos) {
    return std::nullopt;
  }
  return Hidden{std::string(name.substr(1, at - 1)), std::string(pid), old};
}

// The hidden folders that this process works on.
struct HeldPaths {
  std::mutex mutex;
  std::multiset<fs::path> paths;
};

HeldPaths& held_paths() {
  static HeldPaths instance;
  return instance;
}

bool is_held(const fs::path& path) {
  const std::lock_guard lock(held_paths().mutex);
  return held_paths().paths.contains(path);
}

// Of another process: one with this one's id is a former one, as in a container that was started
// again.
bool process_lives(const std::string& pid_text) {
  pid_t pid = 0;
  std::from_chars(pid_text.data(), pid_text.data() + pid_text.size(), pid);
  return pid > 0 && pid != ::getpid() && (::kill(pid, 0) == 0 || errno == EPERM);
}

// A lock dies with its process, whatever happens to process ids. Where folders cannot be locked
// (NFS), the process id in the name decides.
bool is_stale(const fs::path& path, const std::string& pid) {
  if (is_held(path)) return false;
  const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return false;
  const FileDescriptor owner(fd);
  if (::flock(fd, LOCK_EX | LOCK_NB) == 0) return true;
  return errno != EWOULDBLOCK && !process_lives(pid);
}

void rename_or_fail(const fs::path& from, const fs::path& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) fail_file("rename to", to, errno);
}

// For a file system that cannot exchange two names.
void exchange_in_two_moves(const fs::path& path, const fs::path& final_path) {
  const fs::path aside = path.string() + "-old";
  rename_or_fail(final_path, aside);
  try {
    fault::at("checkpoint.aside");
    rename_or_fail(path, final_path);
  } catch (...) {
    rename_or_fail(aside, final_path);
    throw;
  }
  fault::at("checkpoint.replaced");
  rename_or_fail(aside, path);
}

// Leaves what was at `final_path` at `path`.
void exchange(const fs::path& path, const fs::path& final_path) {
  int code = fault::errno_at("checkpoint.exchange");
  if (code == 0) {
    const int result =
        ::renameat2(AT_FDCWD, path.c_str(), AT_FDCWD, final_path.c_str(), RENAME_EXCHANGE);
    code = result == 0 ? 0 : errno;
  }
  if (code == EINVAL || code == ENOSYS) {
    exchange_in_two_moves(path, final_path);
  } else if (code != 0) {
    fail_file("rename to", final_path, code);
  }
}

// What had that name is left at `path`.
void take_name(const fs::path& path, const fs::path& final_path) {
  std::error_code ignored;
  if (fs::exists(fs::symlink_status(final_path, ignored))) {
    exchange(path, final_path);
  } else {
    rename_or_fail(path, final_path);
  }
}

}  // namespace

Held::Held(fs::path path) : path_(std::move(path)) {
  const std::lock_guard lock(held_paths().mutex);
  held_paths().paths.insert(path_);
}

Held::~Held() {
  auto& [mutex, paths] = held_paths();
  const std::lock_guard lock(mutex);
  paths.erase(paths.find(path_));
}

TemporaryFolder::TemporaryFolder(fs::path final_path)
    : final_path_(std::move(final_path)), held_(temporary_name(final_path_)) {
  create_folders(parent_of(final_path_));
  std::error_code error;
  if (!fs::create_directory(path(), error)) {
    fail_file("create the folder", path(), error ? error.value() : EEXIST);
  }
  lock_ = open_file(path(), O_RDONLY | O_DIRECTORY, "open the folder");
  ::flock(lock_.get(), LOCK_EX | LOCK_NB);
}

TemporaryFolder::~TemporaryFolder() {
  if (!left_) remove_logged(path());
}

void TemporaryFolder::publish() {
  sync_folder(path());
  take_name(path(), final_path_);
  sync_folder(parent_of(final_path_));
}

void remove_step(const fs::path& step_folder) {
  const Held hidden(temporary_name(step_folder));
  fault::at("checkpoint.purge");
  remove_logged(hidden.path());
  rename_or_fail(step_folder, hidden.path());
  fault::at("checkpoint.purged");
  remove_logged(hidden.path());
}

void remove_stale(const fs::path& folder,
                  const std::function<bool(const std::string& final_name)>& is_asked_for) {
  std::error_code error;
  std::vector<fs::path> stale;
  std::map<fs::path, fs::path> to_put_back;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    const auto hidden = parse_hidden(entry.path().filename().string());
    if (!hidden || !is_asked_for(hidden->final_name)) continue;
    if (!is_stale(entry.path(), hidden->pid)) continue;
    const fs::path final_path = folder / hidden->final_name;
    if (hidden->old && !fs::exists(final_path)) {
      to_put_back[entry.path()] = final_path;
    } else {
      stale.push_back(entry.path());
    }
  }
  for (const auto& [aside, final_path] : to_put_back) {
    log::info("putting '{}' back, which an interrupted save has moved aside", final_path.string());
    rename_or_fail(aside, final_path);
  }
  for (const auto& path : stale) {
    log::info("removing '{}', which an interrupted save has left", path.string());
    remove_logged(path);
  }
}

}  // namespace longhaul::checkpoint
