// The bytes of a file from front to back, decompressed on the way: plain, gzip (also several
// members) and Zstandard (also several frames). Knows nothing of what the bytes mean. Called by the
// readers of corpora.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include "longhaul/base/error.h"

namespace longhaul::data {

enum class Compression { kNone, kGzip, kZstd };

// Data that are damaged or end early; the message is the reason alone, without the file's name.
class BrokenData : public Error {
 public:
  using Error::Error;
};

class ByteSource {
 public:
  virtual ~ByteSource() = default;

  // Up to `size` bytes to `out`; 0 only at the end. Throws BrokenData behind the last sound byte,
  // and FileError when the disk does not deliver.
  virtual size_t read(char* out, size_t size) = 0;
  // Bytes of the file, not of the text, that were taken so far.
  virtual uint64_t consumed() const = 0;
};

// From byte `offset` of the file on, which must be 0 for compressed ones. FileError if it cannot be
// opened.
std::unique_ptr<ByteSource> open_bytes(const std::filesystem::path& path, Compression compression,
                                       uint64_t offset = 0);

// Appends to `text` until it has `size` bytes. False if the source ended before. Throws as
// ByteSource::read.
bool read_up_to(ByteSource& source, size_t size, std::string& text);

}  // namespace longhaul::data
