#include "longhaul/data/file_format.h"

#include <algorithm>

#include "longhaul/data/utf8.h"

namespace longhaul::data {
namespace {

constexpr size_t kBeginning = size_t{64} << 10;
constexpr std::string_view kBlanks = " \t\r\n";

std::string_view trimmed(std::string_view text) {
  const size_t first = text.find_first_not_of(kBlanks);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kBlanks) - first + 1);
}

// `{"` or `{}`, with blanks between.
bool begins_like_object(std::string_view line) {
  if (!line.starts_with('{')) return false;
  const size_t next = line.find_first_not_of(kBlanks, 1);
  return next != std::string_view::npos && (line[next] == '"' || line[next] == '}');
}

struct Beginning {
  std::string text;
  bool whole = false;
};

// As much as there is of damaged data: their reader says what is wrong.
Beginning beginning_of(ByteSource& source) {
  Beginning beginning;
  beginning.text.resize(kBeginning);
  size_t used = 0;
  try {
    while (used < kBeginning && !beginning.whole) {
      const size_t got = source.read(beginning.text.data() + used, kBeginning - used);
      used += got;
      beginning.whole = got == 0;
    }
  } catch (const BrokenData&) {
  }
  beginning.text.resize(used);
  return beginning;
}

Compression compression_of(std::string_view bytes) {
  if (bytes.starts_with("\x1F\x8B")) return Compression::kGzip;
  // A frame to skip comes first in what pzstd writes: 0x184D2A50 to 0x184D2A5F.
  const bool is_skippable =
      bytes.size() >= 4 && (bytes[0] & 0xF0) == 0x50 && bytes.substr(1).starts_with("\x2A\x4D\x18");
  const bool is_zstd = bytes.starts_with("\x28\xB5\x2F\xFD") || is_skippable;
  return is_zstd ? Compression::kZstd : Compression::kNone;
}

}  // namespace

std::string to_string(const FileFormat& format) {
  const char* const contents[] = {"text", "JSONL", "Parquet", "prepared tokens"};
  const char* const compressions[] = {"", ", gzip", ", Zstandard"};
  return std::string(contents[static_cast<int>(format.content)]) +
         compressions[static_cast<int>(format.compression)];
}

bool looks_like_jsonl(std::string_view beginning, bool whole) {
  if (beginning.starts_with(kByteOrderMark)) beginning.remove_prefix(kByteOrderMark.size());
  size_t lines = 0, objects = 0;
  while (!beginning.empty()) {
    const size_t end = beginning.find('\n');
    const bool complete = end != std::string_view::npos || whole;
    const std::string_view line = trimmed(beginning.substr(0, end));
    beginning.remove_prefix(std::min(end, beginning.size() - 1) + 1);
    if (line.empty()) continue;
    if (!complete && lines > 0) break;
    ++lines;
    objects += begins_like_object(line);
  }
  return objects > 0 && 2 * objects >= lines;
}

FileFormat recognize(const std::filesystem::path& path) {
  Beginning beginning = beginning_of(*open_bytes(path, Compression::kNone));
  if (beginning.text.starts_with("PAR1")) return {.content = Content::kParquet};
  const Compression compression = compression_of(beginning.text);
  if (compression != Compression::kNone) beginning = beginning_of(*open_bytes(path, compression));
  const bool jsonl = looks_like_jsonl(beginning.text, beginning.whole);
  return {compression, jsonl ? Content::kJsonl : Content::kText};
}

}  // namespace longhaul::data
