#include "longhaul/base/safetensors.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <set>
#include <utility>

#include "longhaul/base/json.h"
#include "longhaul/base/text.h"

namespace longhaul::safetensors {
namespace {

static_assert(std::endian::native == std::endian::little, "tensors are stored little-endian");

struct DTypeRow {
  DType dtype;
  std::string_view name;
  int64_t bytes;
};

constexpr std::array<DTypeRow, 11> kDTypes = {{{DType::kF64, "F64", 8},
                                               {DType::kF32, "F32", 4},
                                               {DType::kF16, "F16", 2},
                                               {DType::kBF16, "BF16", 2},
                                               {DType::kI64, "I64", 8},
                                               {DType::kI32, "I32", 4},
                                               {DType::kI16, "I16", 2},
                                               {DType::kI8, "I8", 1},
                                               {DType::kU8, "U8", 1},
                                               {DType::kBool, "BOOL", 1},
                                               {DType::kF8E4M3, "F8_E4M3", 1}}};

constexpr std::string_view kMetadataKey = "__metadata__";
constexpr int64_t kLengthBytes = 8;
// The format's own limit; it keeps a damaged length from asking for all memory.
constexpr int64_t kMaxHeaderBytes = 100'000'000;

template <typename... Args>
[[noreturn]] void fail_format(const std::string& where, fmt::format_string<Args...> format,
                              Args&&... args) {
  fail_user("{}: {}; the file is damaged or no safetensors file, fetch or write it again", where,
            fmt::format(format, std::forward<Args>(args)...));
}

const nlohmann::json& field(const nlohmann::json& object, const char* key, const std::string& name,
                            const std::string& where) {
  const auto found = object.find(key);
  if (found == object.end()) fail_format(where, "tensor '{}' has no '{}'", name, key);
  return *found;
}

int64_t natural(const nlohmann::json& value, const char* what, const std::string& name,
                const std::string& where) {
  const bool fits = value.is_number_unsigned() && value.get<uint64_t>() <= INT64_MAX;
  if (!fits) {
    fail_format(where, "tensor '{}': {} holds {}, which is no size", name, what, value.dump());
  }
  return value.get<int64_t>();
}

std::vector<int64_t> naturals(const nlohmann::json& value, const char* what,
                              const std::string& name, const std::string& where) {
  if (!value.is_array()) fail_format(where, "tensor '{}': {} is no array", name, what);
  std::vector<int64_t> numbers;
  for (const auto& item : value) numbers.push_back(natural(item, what, name, where));
  return numbers;
}

DType parse_dtype(const nlohmann::json& value, const std::string& name, const std::string& where) {
  const auto dtype = value.is_string() ? dtype_from_name(value.get_ref<const std::string&>())
                                       : std::optional<DType>();
  if (!dtype) {
    std::string known;
    for (const auto& row : kDTypes) known += fmt::format(" {}", row.name);
    fail_user("{}: tensor '{}' has the dtype {}; known are{}", where, name, value.dump(), known);
  }
  return *dtype;
}

TensorInfo parse_tensor(const std::string& name, const nlohmann::json& value,
                        const std::string& where) {
  if (!value.is_object()) fail_format(where, "the header's entry '{}' is no object", name);
  TensorInfo info;
  info.name = name;
  info.dtype = parse_dtype(field(value, "dtype", name, where), name, where);
  info.shape = naturals(field(value, "shape", name, where), "shape", name, where);
  const auto offsets =
      naturals(field(value, "data_offsets", name, where), "data_offsets", name, where);
  if (offsets.size() != 2 || offsets[0] > offsets[1]) {
    fail_format(where, "tensor '{}': data_offsets {} are no begin and end", name,
                shape_text(offsets));
  }
  info.begin = offsets[0];
  info.end = offsets[1];
  const int64_t expected = tensor_bytes(info.dtype, info.shape, where + ": tensor '" + name + "'");
  if (expected != info.bytes()) {
    fail_format(where, "tensor '{}' of {} {} takes {} bytes but has {}", name,
                dtype_name(info.dtype), shape_text(info.shape), expected, info.bytes());
  }
  return info;
}

std::map<std::string, std::string> parse_metadata(const nlohmann::json& value,
                                                  const std::string& where) {
  if (!value.is_object()) fail_format(where, "{} is no object", kMetadataKey);
  std::map<std::string, std::string> metadata;
  for (const auto& [key, text] : value.items()) {
    if (!text.is_string()) fail_format(where, "{}: '{}' is no string", kMetadataKey, key);
    metadata[key] = text.get<std::string>();
  }
  return metadata;
}

bool by_place(const TensorInfo* a, const TensorInfo* b) {
  return std::tie(a->begin, a->end, a->name) < std::tie(b->begin, b->end, b->name);
}

// The tensors must tile the data section from its begin to the end of the file.
void check_places(const Header& header, int64_t data_bytes, const std::string& where) {
  std::vector<const TensorInfo*> order;
  for (const auto& [name, info] : header.tensors) order.push_back(&info);
  std::sort(order.begin(), order.end(), by_place);
  int64_t next = 0;
  const TensorInfo* previous = nullptr;
  for (const TensorInfo* info : order) {
    if (info->end > data_bytes) {
      fail_format(where, "tensor '{}' ends at byte {} of the data, which has {}: truncated",
                  info->name, info->end, data_bytes);
    }
    if (info->begin < next) {
      fail_format(where, "tensors '{}' and '{}' overlap", previous->name, info->name);
    }
    if (info->begin > next) {
      fail_format(where, "bytes {} to {} before tensor '{}' belong to no tensor", next, info->begin,
                  info->name);
    }
    next = info->end;
    previous = info;
  }
  if (next != data_bytes) {
    fail_format(where, "{} bytes after the last tensor belong to no tensor", data_bytes - next);
  }
}

int64_t parse_length(std::string_view start, int64_t file_bytes, const std::string& where) {
  if (file_bytes < kLengthBytes || start.size() < kLengthBytes) {
    fail_format(where, "it has {} bytes, fewer than the 8 of the header's length", file_bytes);
  }
  uint64_t length = 0;
  std::memcpy(&length, start.data(), kLengthBytes);
  if (length > static_cast<uint64_t>(kMaxHeaderBytes)) {
    fail_format(where, "its header claims {} bytes, the format allows {}", length, kMaxHeaderBytes);
  }
  const auto bytes = static_cast<int64_t>(length);
  if (bytes > file_bytes - kLengthBytes) {
    fail_format(where, "its header claims {} bytes but the file has {}: truncated", bytes,
                file_bytes);
  }
  return bytes;
}

// Gives every tensor its place and returns the length and the JSON, padded to 8 bytes.
std::string encode_header(std::vector<TensorInfo>& tensors, const Metadata& metadata,
                          const std::string& where) {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  if (!metadata.empty()) json[std::string(kMetadataKey)] = metadata;
  int64_t next = 0;
  for (TensorInfo& info : tensors) {
    info.begin = next;
    info.end = next + tensor_bytes(info.dtype, info.shape, where + ": tensor '" + info.name + "'");
    next = info.end;
    json[info.name] = {{"dtype", dtype_name(info.dtype)},
                       {"shape", info.shape},
                       {"data_offsets", {info.begin, info.end}}};
  }
  std::string text;
  try {
    text = json.dump();
  } catch (const nlohmann::json::type_error&) {
    fail_user("{}: a tensor's name or its metadata is not UTF-8", where);
  }
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const uint64_t length = text.size();
  std::string head(kLengthBytes, '\0');
  std::memcpy(head.data(), &length, kLengthBytes);
  return head + text;
}

void check_names(const std::vector<TensorInfo>& tensors, const std::string& where) {
  std::set<std::string_view> names;
  for (const TensorInfo& info : tensors) {
    LONGHAUL_CHECK(!info.name.empty() && info.name != kMetadataKey,
                   "{}: '{}' is no name for a tensor", where, info.name);
    LONGHAUL_CHECK(names.insert(info.name).second, "{}: two tensors are called '{}'", where,
                   info.name);
  }
}

}  // namespace

void order_for_writing(std::vector<TensorInfo>& tensors) {
  std::sort(tensors.begin(), tensors.end(), [](const TensorInfo& a, const TensorInfo& b) {
    const int64_t a_bytes = dtype_bytes(a.dtype), b_bytes = dtype_bytes(b.dtype);
    return a_bytes != b_bytes ? a_bytes > b_bytes : a.name < b.name;
  });
}

std::string_view dtype_name(DType dtype) { return kDTypes[static_cast<size_t>(dtype)].name; }

std::optional<DType> dtype_from_name(std::string_view name) {
  for (const auto& row : kDTypes) {
    if (row.name == name) return row.dtype;
  }
  return std::nullopt;
}

int64_t dtype_bytes(DType dtype) { return kDTypes[static_cast<size_t>(dtype)].bytes; }

std::string shape_text(const std::vector<int64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

const TensorInfo& Header::find(const std::string& name, const std::string& where) const {
  const auto found = tensors.find(name);
  if (found != tensors.end()) return found->second;
  std::vector<std::string> names;
  for (const auto& [other, info] : tensors) names.push_back(other);
  fail_user("{}: there is no tensor '{}'{}", where, name, did_you_mean(name, names));
}

int64_t tensor_bytes(DType dtype, const std::vector<int64_t>& shape, const std::string& where) {
  int64_t bytes = dtype_bytes(dtype);
  for (const int64_t size : shape) {
    if (size < 0 || __builtin_mul_overflow(bytes, size, &bytes)) {
      fail_format(where, "the shape {} is impossible", shape_text(shape));
    }
  }
  return bytes;
}

Header parse_header(std::string_view start, int64_t file_bytes, const std::string& where) {
  const int64_t length = parse_length(start, file_bytes, where);
  LONGHAUL_CHECK(static_cast<int64_t>(start.size()) >= kLengthBytes + length,
                 "{}: the header is not there as a whole", where);
  const auto json =
      parse_json(start.substr(kLengthBytes, static_cast<size_t>(length)), where + " (header)");
  if (!json.is_object()) fail_format(where, "its header is no JSON object");
  Header header;
  header.data_start = kLengthBytes + length;
  for (const auto& [name, value] : json.items()) {
    if (name == kMetadataKey) {
      header.metadata = parse_metadata(value, where);
    } else {
      header.tensors.emplace(name, parse_tensor(name, value, where));
    }
  }
  check_places(header, file_bytes - header.data_start, where);
  return header;
}

Writer::Writer(const fs::path& path, std::vector<TensorInfo> tensors, const Metadata& metadata,
               Order order)
    : file_(path), tensors_(std::move(tensors)) {
  check_names(tensors_, path.string());
  if (order == Order::kForWriting) order_for_writing(tensors_);
  const std::string head = encode_header(tensors_, metadata, path.string());
  LONGHAUL_CHECK(static_cast<int64_t>(head.size()) <= kMaxHeaderBytes,
                 "{}: the header would have {} bytes; use more files", path.string(), head.size());
  data_start_ = static_cast<int64_t>(head.size());
  file_.write(head);
  header_hash_ = hash_hex(head);
}

std::string Writer::write(const std::string& name, const void* data, size_t bytes,
                          const std::function<void(int64_t)>& written) {
  LONGHAUL_CHECK(next_ < tensors_.size() && tensors_[next_].name == name,
                 "{}: it is not the turn of tensor '{}'", file_.path().string(), name);
  const int64_t expected = tensors_[next_].bytes();
  LONGHAUL_CHECK(expected == static_cast<int64_t>(bytes), "{}: tensor '{}' takes {} bytes, got {}",
                 file_.path().string(), name, expected, bytes);
  ++next_;
  Hasher hash;
  const auto* next = static_cast<const std::byte*>(data);
  for (size_t left = bytes; left > 0;) {
    const size_t piece = std::min(left, kHashPiece);
    hash.update(next, piece);
    file_.write(next, piece);
    if (written) written(static_cast<int64_t>(piece));
    next += piece;
    left -= piece;
  }
  return hash.hex();
}

void Writer::finish() {
  LONGHAUL_CHECK(next_ == tensors_.size(), "{}: tensor '{}' was never written",
                 file_.path().string(), tensors_[next_].name);
  file_.finish();
}

}  // namespace longhaul::safetensors
