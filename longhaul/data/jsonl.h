// Documents from JSONL: an object a line, whose text stands in one field. Called through
// document_reader.h.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "longhaul/data/document_reader.h"

namespace simdjson::dom {
class parser;
}

namespace longhaul::data {

// Lines of at most this many bytes; a longer one is a bad document. On its way to ids a line takes
// 15 to 32 times its size in memory.
inline constexpr size_t kLongestLine = size_t{32} << 20;

std::unique_ptr<DocumentReader> open_jsonl(const SourceFile& file, const Unit& unit,
                                           const DocumentOptions& options, BadDocuments& bad);

// The text of one line; `why` is what is wrong with it, or empty.
class JsonlLine {
 public:
  explicit JsonlLine(const DocumentOptions& options);
  ~JsonlLine();

  // False, with why() set, if the line holds no text that can be used.
  bool read(std::string_view line, Document& document);
  const std::string& why() const { return why_; }

 private:
  bool take_text(std::string_view line, Document& document);

  const DocumentOptions& options_;
  std::unique_ptr<simdjson::dom::parser> parser_;
  std::string why_;
};

}  // namespace longhaul::data
