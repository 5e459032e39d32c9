#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <utility>

#include "longhaul/base/safetensors.h"

namespace longhaul::safetensors {
namespace {

std::span<const std::byte> map_file(const fs::path& path) {
  const FileDescriptor fd = open_file(path, O_RDONLY, "read");
  struct stat status {};
  if (::fstat(fd.get(), &status) != 0) fail_file("read", path, errno);
  if (!S_ISREG(status.st_mode))
    fail_user("'{}' is no file; name a .safetensors file", path.string());
  const auto size = static_cast<size_t>(status.st_size);
  if (size == 0) return {};
  void* data = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, fd.get(), 0);
  if (data == MAP_FAILED) fail_file("map", path, errno);
  return {static_cast<const std::byte*>(data), size};
}

void unmap(const std::byte* data, size_t size) {
  if (data != nullptr) ::munmap(const_cast<std::byte*>(data), size);
}

}  // namespace

Reader::Reader(const fs::path& path) : path_(path) {
  const auto mapped = map_file(path);
  const std::string_view text(reinterpret_cast<const char*>(mapped.data()), mapped.size());
  try {
    header_ = parse_header(text, static_cast<int64_t>(mapped.size()), path.string());
  } catch (...) {
    unmap(mapped.data(), mapped.size());
    throw;
  }
  data_ = mapped.data();
  size_ = mapped.size();
}

Reader::Reader(Reader&& other) noexcept
    : path_(std::move(other.path_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      header_(std::move(other.header_)) {}

Reader::~Reader() { unmap(data_, size_); }

const TensorInfo& Reader::info(const std::string& name) const {
  return header_.find(name, path_.string());
}

std::span<const std::byte> Reader::bytes(const TensorInfo& info) const {
  return file().subspan(static_cast<size_t>(header_.data_start + info.begin),
                        static_cast<size_t>(info.bytes()));
}

}  // namespace longhaul::safetensors
