#include "longhaul/data/byte_source.h"

#include <fcntl.h>
#include <unistd.h>
#include <zlib.h>
#include <zstd.h>

#include <algorithm>
#include <cerrno>
#include <vector>

#include "longhaul/base/file.h"

namespace longhaul::data {
namespace {

constexpr size_t kPiece = size_t{256} << 10;

class PlainBytes : public ByteSource {
 public:
  PlainBytes(const fs::path& path, uint64_t offset)
      : path_(path), fd_(open_file(path, O_RDONLY, "read")), begin_(offset), at_(offset) {
    ::posix_fadvise(fd_.get(), static_cast<off_t>(offset), 0, POSIX_FADV_SEQUENTIAL);
  }

  size_t read(char* out, size_t size) override {
    while (true) {
      const ssize_t got = ::pread(fd_.get(), out, size, static_cast<off_t>(at_));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) fail_file("read", path_, errno);
      at_ += static_cast<uint64_t>(got);
      return static_cast<size_t>(got);
    }
  }

  uint64_t consumed() const override { return at_ - begin_; }

 private:
  fs::path path_;
  FileDescriptor fd_;
  uint64_t begin_, at_;
};

// The compressed bytes of a file, piece by piece.
class Input {
 public:
  explicit Input(const fs::path& path) : file_(path, 0), piece_(kPiece) {}

  // False at the end of the file.
  bool fill() {
    size_ = file_.read(piece_.data(), piece_.size());
    return size_ > 0;
  }
  char* data() { return piece_.data(); }
  size_t size() const { return size_; }
  uint64_t consumed() const { return file_.consumed(); }

 private:
  PlainBytes file_;
  std::vector<char> piece_;
  size_t size_ = 0;
};

class GzipBytes : public ByteSource {
 public:
  explicit GzipBytes(const fs::path& path) : input_(path) {
    constexpr int kLargestWindow = 15, kGzipHeader = 16;
    const int status = inflateInit2(&stream_, kLargestWindow + kGzipHeader);
    LONGHAUL_CHECK(status == Z_OK, "inflateInit2: {}", status);
  }
  ~GzipBytes() override { inflateEnd(&stream_); }
  GzipBytes(const GzipBytes&) = delete;

  size_t read(char* out, size_t size) override {
    constexpr size_t kMostAtOnce = size_t{1} << 30;  // zlib counts in 32 bits
    size = std::min(size, kMostAtOnce);
    stream_.next_out = reinterpret_cast<Bytef*>(out);
    stream_.avail_out = static_cast<uInt>(size);
    while (stream_.avail_out == size && !ended_) inflate_some(size);
    return size - stream_.avail_out;
  }

  uint64_t consumed() const override { return input_.consumed(); }

 private:
  void inflate_some(size_t size) {
    if (stream_.avail_in == 0) {
      if (!input_.fill()) return end();
      stream_.next_in = reinterpret_cast<Bytef*>(input_.data());
      stream_.avail_in = narrow<uInt>(static_cast<int64_t>(input_.size()));
    }
    if (between_members_) {
      if (skip_zeros()) return;
      inflateReset(&stream_);
      between_members_ = false;
    }
    const int status = inflate(&stream_, Z_NO_FLUSH);
    if (status == Z_STREAM_END) {
      between_members_ = true;
    } else if (status != Z_OK && status != Z_BUF_ERROR && stream_.avail_out == size) {
      // What came before the damage is handed out first; the next call fails here again.
      throw BrokenData(fmt::format("the gzip data are damaged ({})",
                                   stream_.msg ? stream_.msg : "no reason given"));
    }
  }

  // Zero bytes behind a member fill up a block of a tape or disk. True if there is nothing else
  // yet.
  bool skip_zeros() {
    for (; stream_.avail_in > 0 && *stream_.next_in == 0; --stream_.avail_in) ++stream_.next_in;
    return stream_.avail_in == 0;
  }

  void end() {
    if (!between_members_) throw BrokenData("the gzip data end early: truncated");
    ended_ = true;
  }

  Input input_;
  z_stream stream_ = {};
  bool between_members_ = false;  // one has ended, and nothing of the next one was read
  bool ended_ = false;
};

class ZstdBytes : public ByteSource {
 public:
  explicit ZstdBytes(const fs::path& path) : input_(path), stream_(ZSTD_createDStream()) {
    LONGHAUL_CHECK(stream_, "ZSTD_createDStream failed");
    // Of `zstd --long`; what a file was not compressed with costs nothing.
    const int largest_window = ZSTD_dParam_getBounds(ZSTD_d_windowLogMax).upperBound;
    ZSTD_DCtx_setParameter(stream_.get(), ZSTD_d_windowLogMax, largest_window);
  }

  size_t read(char* out, size_t size) override {
    ZSTD_outBuffer to = {out, size, 0};
    while (to.pos == 0) {
      if (!damage_.empty()) throw BrokenData(damage_);
      if (from_.pos == from_.size && !flushing_) {
        if (!input_.fill()) {
          if (inside_frame_) throw BrokenData("the Zstandard data end early: truncated");
          return 0;
        }
        from_ = {input_.data(), input_.size(), 0};
      }
      const size_t left = ZSTD_decompressStream(stream_.get(), &to, &from_);
      if (ZSTD_isError(left)) {
        // What came before the damage is handed out first.
        damage_ = fmt::format("the Zstandard data are damaged ({})", ZSTD_getErrorName(left));
        continue;
      }
      inside_frame_ = left != 0;
      flushing_ = to.pos == to.size && inside_frame_;  // it may hold more than fitted
    }
    return to.pos;
  }

  uint64_t consumed() const override { return input_.consumed(); }

 private:
  struct Free {
    void operator()(ZSTD_DStream* stream) const { ZSTD_freeDStream(stream); }
  };
  Input input_;
  std::unique_ptr<ZSTD_DStream, Free> stream_;
  ZSTD_inBuffer from_ = {nullptr, 0, 0};
  bool inside_frame_ = false, flushing_ = false;
  std::string damage_;
};

}  // namespace

std::unique_ptr<ByteSource> open_bytes(const fs::path& path, Compression compression,
                                       uint64_t offset) {
  LONGHAUL_CHECK(offset == 0 || compression == Compression::kNone,
                 "no place inside compressed data: {}", offset);
  if (compression == Compression::kGzip) return std::make_unique<GzipBytes>(path);
  if (compression == Compression::kZstd) return std::make_unique<ZstdBytes>(path);
  return std::make_unique<PlainBytes>(path, offset);
}

bool read_up_to(ByteSource& source, size_t size, std::string& text) {
  size_t used = text.size();
  bool more = true;
  while (more && used < size) {
    if (text.size() - used < kPiece) text.resize(std::min(size, 2 * text.size() + kPiece));
    const size_t got = source.read(text.data() + used, text.size() - used);
    more = got > 0;
    used += got;
  }
  text.resize(used);
  return more;
}

}  // namespace longhaul::data
