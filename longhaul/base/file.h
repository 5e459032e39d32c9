// Files that are either complete or absent: whole reads, streaming writes with checked results, and
// replacement by rename. Not a stream library: no formatting, no buffering. Called by everything
// that leaves state on disk. Errors are FileError: one line with the path, the reason and a remedy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

#include "longhaul/base/error.h"

namespace longhaul {

namespace fs = std::filesystem;

// A failed operation on a file; code() is its errno.
class FileError : public UserError {
 public:
  FileError(int code, const std::string& message) : UserError(message), code_(code) {}
  int code() const { return code_; }

 private:
  int code_;
};

// Throws FileError "cannot <verb> '<path>': <reason>; <remedy>".
[[noreturn]] void fail_file(std::string_view verb, const fs::path& path, int code);

// Bytes that an ordinary user may still write to the file system of `path`; -1 if unknown.
int64_t available_bytes(const fs::path& path);

// Owns a file descriptor.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(other.release()) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept;
  ~FileDescriptor() { reset(); }

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  int release();
  void reset();

 private:
  int fd_ = -1;
};

// open(2) with O_CLOEXEC; throws FileError, naming `verb`.
FileDescriptor open_file(const fs::path& path, int flags, std::string_view verb);

// The whole file.
std::string read_file(const fs::path& path);

// Reads parts of a file, each from its place; meant for going through it in order. Threads may
// share one.
class FileReader {
 public:
  explicit FileReader(fs::path path);

  // Fills `out` from byte `offset` on. UserError if the file ends before.
  void read(int64_t offset, std::span<std::byte> out) const;

 private:
  fs::path path_;
  FileDescriptor fd_;
};

// The folder and those above it, where they are not there yet; durably. Fault point:
// file.sync_parent.
void create_folders(const fs::path& folder);

// fsync of a folder, which makes the names in it durable.
void sync_folder(const fs::path& folder);

// rename(2), then fsync of the folder that holds `to`. Replaces a file at `to`.
void rename_durably(const fs::path& from, const fs::path& to);

// Replaces the file at `path` by `bytes`, or leaves it as it was and throws.
void write_atomic(const fs::path& path, std::string_view bytes);

// Writes a new file from start to end. The disk gets to work while more is written, so that
// finish() has little left to wait for. A writer that is destroyed before finish() removes its
// file. Fault points: file.write, file.sync.
class FileWriter {
 public:
  // Creates the file, or empties it.
  explicit FileWriter(fs::path path);
  FileWriter(FileWriter&& other) noexcept;
  FileWriter& operator=(FileWriter&&) = delete;
  ~FileWriter();

  void write(const void* data, size_t bytes);
  void write(std::string_view text) { write(text.data(), text.size()); }
  // fsync and close.
  void finish();

  const fs::path& path() const { return path_; }
  int64_t size() const { return size_; }

 private:
  void start_writeback();

  fs::path path_;
  FileDescriptor fd_;
  int64_t size_ = 0;
  int64_t handed_over_ = 0;  // bytes that the disk was told to write
};

// A FileWriter beside `path` that takes the name at commit(). Fault point: file.rename.
class AtomicFile {
 public:
  explicit AtomicFile(fs::path path);
  AtomicFile(const AtomicFile&) = delete;
  ~AtomicFile();

  FileWriter& writer() { return writer_; }
  void commit();

 private:
  fs::path path_;
  FileWriter writer_;
  bool committed_ = false;
};

// The hidden name beside `path` under which its next contents are prepared.
fs::path temporary_name(const fs::path& path);

}  // namespace longhaul
