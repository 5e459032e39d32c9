// The safetensors format (github.com/huggingface/safetensors, README, "Format"): 8 bytes of header
// length, little-endian; a JSON header; then the tensors' bytes, without gaps. This file knows
// bytes and shapes, no tensor type: checkpoint/ turns them into at::Tensor. A file is untrusted:
// whatever does not fit is a UserError with the path, and nothing is read outside of the file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "longhaul/base/file.h"
#include "longhaul/base/hash.h"

namespace longhaul::safetensors {

enum class DType : uint8_t { kF64, kF32, kF16, kBF16, kI64, kI32, kI16, kI8, kU8, kBool, kF8E4M3 };

// As in the header: "F64", "BF16", "F8_E4M3".
std::string_view dtype_name(DType dtype);
std::optional<DType> dtype_from_name(std::string_view name);
int64_t dtype_bytes(DType dtype);

// "[2, 48]".
std::string shape_text(const std::vector<int64_t>& shape);

struct TensorInfo {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  // Bytes begin .. end - 1 of the data section; a Writer computes them.
  int64_t begin = 0;
  int64_t end = 0;

  int64_t bytes() const { return end - begin; }
  int64_t elements() const { return bytes() / dtype_bytes(dtype); }
};

struct Header {
  std::map<std::string, TensorInfo> tensors;
  std::map<std::string, std::string> metadata;
  // Where the data section begins in the file.
  int64_t data_start = 0;

  // UserError, with the nearest name, if there is none. `where` names the file.
  const TensorInfo& find(const std::string& name, const std::string& where) const;
};

// The bytes that a tensor of this shape takes; UserError on a negative size or above 2^63.
int64_t tensor_bytes(DType dtype, const std::vector<int64_t>& shape, const std::string& where);

// Reads and checks the header of a file of `file_bytes` bytes, whose first ones are `start` (at
// least the whole header).
Header parse_header(std::string_view start, int64_t file_bytes, const std::string& where);

// A file mapped into memory. The spans live as long as the reader.
class Reader {
 public:
  explicit Reader(const fs::path& path);
  Reader(Reader&& other) noexcept;
  Reader& operator=(Reader&&) = delete;
  ~Reader();

  const fs::path& path() const { return path_; }
  const Header& header() const { return header_; }
  const TensorInfo& info(const std::string& name) const;
  std::span<const std::byte> bytes(const TensorInfo& info) const;
  std::span<const std::byte> file() const { return {data_, size_}; }

 private:
  fs::path path_;
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
  Header header_;
};

using Metadata = std::map<std::string, std::string>;

// The order of a new file's data section: by descending element size and then by name, so that
// every tensor is aligned to its element size.
void order_for_writing(std::vector<TensorInfo>& tensors);

// Streams tensors into a new file; write() follows tensors().
class Writer {
 public:
  // kForWriting is that of order_for_writing().
  enum class Order : uint8_t { kForWriting, kAsGiven };

  // begin and end of `tensors` are ignored.
  Writer(const fs::path& path, std::vector<TensorInfo> tensors, const Metadata& metadata = {},
         Order order = Order::kForWriting);

  // In the order of the data section, with offsets.
  const std::vector<TensorInfo>& tensors() const { return tensors_; }
  // Where the data section begins in the file.
  int64_t data_start() const { return data_start_; }

  // All bytes of the next tensor; `name` must be its name. Returns their XXH3-128. `written` is
  // told the size of each piece.
  std::string write(const std::string& name, const void* data, size_t bytes,
                    const std::function<void(int64_t)>& written = {});
  // Checks that all are there, syncs, closes. Without it the file is removed again.
  void finish();

  int64_t file_bytes() const { return file_.size(); }
  // XXH3-128 of what is before the data section.
  const std::string& header_hash() const { return header_hash_; }

 private:
  FileWriter file_;
  std::string header_hash_;
  std::vector<TensorInfo> tensors_;
  size_t next_ = 0;
  int64_t data_start_ = 0;
};

}  // namespace longhaul::safetensors
