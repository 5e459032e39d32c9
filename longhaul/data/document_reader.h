// The documents of one unit of a corpus, one after another. Those that cannot be read are reported
// and left out, or end it with a UserError. Called by what tokenises, prepares and counts.
#pragma once

#include <memory>

#include "longhaul/data/source.h"

namespace longhaul::data {

// A text file is one document of up to so many bytes. A longer one is cut at ends of lines into
// several, so that memory is bounded.
inline constexpr size_t kLongestText = size_t{16} << 20;

class DocumentReader {
 public:
  virtual ~DocumentReader() = default;

  // False behind the last document.
  virtual bool next(Document& document) = 0;
  // Bytes of the file that were taken so far; at the end the unit's disk_bytes, about.
  virtual uint64_t consumed() const = 0;
};

// Of a unit of text: prepared tokens have a reader of their own (token_shard.h). `options` and
// `bad` outlive the reader. FileError if the file cannot be opened.
std::unique_ptr<DocumentReader> open_documents(const SourceFile& file, const Unit& unit,
                                               const DocumentOptions& options, BadDocuments& bad);

}  // namespace longhaul::data
