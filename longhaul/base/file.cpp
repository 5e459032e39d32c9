#include "longhaul/base/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>
#include <vector>

#include "longhaul/base/fault.h"
#include "longhaul/base/text.h"

namespace longhaul {
namespace {

// The disk is told to begin when so many bytes wait for it; more are not written in one call.
constexpr int64_t kWriteback = int64_t{8} << 20;

fs::path folder_of(const fs::path& path) {
  return path.has_parent_path() ? path.parent_path() : fs::path(".");
}

std::string remedy(const fs::path& path, int code) {
  switch (code) {
    case ENOSPC:
    case EDQUOT: {
      const int64_t left = available_bytes(folder_of(path));
      const std::string known = left < 0 ? "" : fmt::format(" ({} left)", human_bytes(left));
      return fmt::format("; free space there{} or choose another folder", known);
    }
    case EFBIG:
      return "; raise the limit on the size of a file (ulimit -f)";
    case EACCES:
    case EPERM:
      return "; check its permissions";
    case EROFS:
      return "; choose a folder that may be written";
    case ENOENT:
    case ENOTDIR:
      return "; check the path";
    default:
      return "";
  }
}

// The file that `path` names, behind links: a rename would put the file in a link's place, or in
// that of a device, to which every program of the machine writes.
fs::path replaceable(fs::path path) {
  std::error_code ignored, error;
  // Asked first, since what links of /proc name need not be a path.
  const fs::file_status status = fs::status(path, ignored);
  if (fs::exists(status) && !fs::is_regular_file(status)) {
    throw FileError(fs::is_directory(status) ? EISDIR : EINVAL,
                    fmt::format("'{}' is no regular file; name another", path.string()));
  }
  constexpr int kMostLinks = 40;  // as Linux follows
  for (int links = 0; fs::is_symlink(fs::symlink_status(path, ignored)); ++links) {
    if (links == kMostLinks) fail_file("write", path, ELOOP);
    const fs::path target = fs::read_symlink(path, error);
    if (error) fail_file("read the link", path, error.value());
    path = folder_of(path) / target;
  }
  return path;
}

}  // namespace

void fail_file(std::string_view verb, const fs::path& path, int code) {
  throw FileError(code, fmt::format("cannot {} '{}': {}{}", verb, path.string(),
                                    std::generic_category().message(code), remedy(path, code)));
}

int64_t available_bytes(const fs::path& path) {
  struct statvfs status {};
  if (::statvfs(path.c_str(), &status) != 0) return -1;
  return static_cast<int64_t>(status.f_bavail) * static_cast<int64_t>(status.f_frsize);
}

FileDescriptor& FileDescriptor::operator=(FileDescriptor&& other) noexcept {
  if (this != &other) {
    reset();
    fd_ = other.release();
  }
  return *this;
}

int FileDescriptor::release() { return std::exchange(fd_, -1); }

void FileDescriptor::reset() {
  if (fd_ >= 0) ::close(release());
}

FileDescriptor open_file(const fs::path& path, int flags, std::string_view verb) {
  const int fd = ::open(path.c_str(), flags | O_CLOEXEC, 0666);
  if (fd < 0) fail_file(verb, path, errno);
  return FileDescriptor(fd);
}

std::string read_file(const fs::path& path) {
  const FileDescriptor fd = open_file(path, O_RDONLY, "read");
  struct stat status {};
  if (::fstat(fd.get(), &status) != 0) fail_file("read", path, errno);
  if (S_ISDIR(status.st_mode)) fail_file("read", path, EISDIR);
  std::string bytes;
  // A size of 0 may also mean "unknown" (/proc, pipes), so read until the end in any case.
  bytes.resize(static_cast<size_t>(status.st_size) + 1);
  size_t used = 0;
  while (true) {
    const ssize_t got = ::read(fd.get(), bytes.data() + used, bytes.size() - used);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail_file("read", path, errno);
    if (got == 0) break;
    used += static_cast<size_t>(got);
    if (used == bytes.size()) bytes.resize(2 * bytes.size() + 4096);
  }
  bytes.resize(used);
  return bytes;
}

FileReader::FileReader(fs::path path)
    : path_(std::move(path)), fd_(open_file(path_, O_RDONLY, "read")) {
  ::posix_fadvise(fd_.get(), 0, 0, POSIX_FADV_SEQUENTIAL);
}

void FileReader::read(int64_t offset, std::span<std::byte> out) const {
  while (!out.empty()) {
    const ssize_t got = ::pread(fd_.get(), out.data(), out.size(), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail_file("read", path_, errno);
    if (got == 0) fail_user("'{}' is truncated: it ends at byte {}", path_.string(), offset);
    offset += got;
    out = out.subspan(static_cast<size_t>(got));
  }
}

void create_folders(const fs::path& folder) {
  std::error_code error;
  std::vector<fs::path> missing;
  const fs::path whole = folder.has_filename() ? folder : folder.parent_path();
  for (fs::path path = whole; !path.empty() && !fs::exists(path, error);
       path = path.parent_path()) {
    missing.push_back(path);
  }
  fs::create_directories(folder, error);
  if (error) fail_file("create the folder", folder, error.value());
  for (const fs::path& path : missing) {
    const fs::path parent = folder_of(path);
    if (const int code = fault::errno_at("file.sync_parent")) {
      fail_file("sync the folder", parent, code);
    }
    sync_folder(parent);
  }
}

void sync_folder(const fs::path& folder) {
  const FileDescriptor fd = open_file(folder, O_RDONLY | O_DIRECTORY, "open the folder");
  // Some file systems know no fsync of a folder and say EINVAL.
  if (::fsync(fd.get()) != 0 && errno != EINVAL) fail_file("sync the folder", folder, errno);
}

void rename_durably(const fs::path& from, const fs::path& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) fail_file("rename to", to, errno);
  sync_folder(folder_of(to));
}

fs::path temporary_name(const fs::path& path) {
  return folder_of(path) / fmt::format(".{}.tmp-{}", path.filename().string(), ::getpid());
}

void write_atomic(const fs::path& path, std::string_view bytes) {
  AtomicFile file(path);
  file.writer().write(bytes);
  file.commit();
}

FileWriter::FileWriter(fs::path path)
    : path_(std::move(path)), fd_(open_file(path_, O_WRONLY | O_CREAT | O_TRUNC, "create")) {}

FileWriter::FileWriter(FileWriter&& other) noexcept
    : path_(std::move(other.path_)),
      fd_(std::move(other.fd_)),
      size_(other.size_),
      handed_over_(other.handed_over_) {}

FileWriter::~FileWriter() {
  if (fd_.valid()) ::unlink(path_.c_str());
}

void FileWriter::write(const void* data, size_t bytes) {
  LONGHAUL_CHECK(fd_.valid(), "'{}' is written after finish()", path_.string());
  const fault::Order order = fault::order_at("file.write");
  if (order.code != 0) fail_file("write", path_, order.code);
  std::string damaged;
  if (order.flipped_bit && bytes > 0) {
    damaged.assign(static_cast<const char*>(data), bytes);
    damaged[bytes / 2] ^= 1;
    data = damaged.data();
  }
  size_t at_most = order.short_write ? ceil_div(bytes, 2) : kWriteback;
  const char* next = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t done = ::write(fd_.get(), next, std::min(bytes, at_most));
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) fail_file("write", path_, errno);
    next += done;
    bytes -= static_cast<size_t>(done);
    size_ += done;
    at_most = kWriteback;
    start_writeback();
  }
}

// Only a hint: what the system does not do is left to finish().
void FileWriter::start_writeback() {
  const int64_t waiting = size_ - handed_over_;
  if (waiting < kWriteback) return;
  ::sync_file_range(fd_.get(), handed_over_, waiting, SYNC_FILE_RANGE_WRITE);
  handed_over_ = size_;
}

void FileWriter::finish() {
  LONGHAUL_CHECK(fd_.valid(), "'{}' is finished twice", path_.string());
  if (const int code = fault::errno_at("file.sync")) fail_file("sync", path_, code);
  if (::fsync(fd_.get()) != 0 && errno != EINVAL) fail_file("sync", path_, errno);
  // A network file system may report a failed write only now.
  if (::close(fd_.release()) != 0 && errno != EINTR) {
    const int code = errno;
    ::unlink(path_.c_str());
    fail_file("close", path_, code);
  }
}

AtomicFile::AtomicFile(fs::path path)
    : path_(replaceable(std::move(path))), writer_(temporary_name(path_)) {}

AtomicFile::~AtomicFile() {
  if (!committed_) ::unlink(writer_.path().c_str());
}

void AtomicFile::commit() {
  writer_.finish();
  if (const int code = fault::errno_at("file.rename")) fail_file("rename to", path_, code);
  if (::rename(writer_.path().c_str(), path_.c_str()) != 0) fail_file("rename to", path_, errno);
  committed_ = true;
  sync_folder(folder_of(path_));
}

}  // namespace longhaul
