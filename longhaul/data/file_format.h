// What a file of a corpus holds, told by its content and never by its name. Called where a corpus
// is opened.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "longhaul/data/byte_source.h"

namespace longhaul::data {

enum class Content {
  kText,     // one document, unless it is very long
  kJsonl,    // a document a line
  kParquet,  // a document a row
  kTokens,   // prepared (token_shard.h)
};

struct FileFormat {
  Compression compression = Compression::kNone;
  Content content = Content::kText;
};

// "JSONL, gzip".
std::string to_string(const FileFormat& format);

// Looks at the beginning of the file. FileError if it cannot be read.
FileFormat recognize(const std::filesystem::path& path);

// Whether a text that begins so is JSONL: at least half of its lines begin like objects, whatever
// becomes of them; their reader says what is wrong. `whole`: nothing follows.
bool looks_like_jsonl(std::string_view beginning, bool whole);

}  // namespace longhaul::data
