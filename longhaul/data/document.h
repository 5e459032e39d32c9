// A document of a corpus, which of them are taken, and what happens to those that cannot be read.
// Called by the readers of files and by what tokenises them.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "longhaul/data/text_file.h"

namespace longhaul::data {

struct Document {
  std::string text;       // valid UTF-8 without NUL; may be empty
  bool replaced = false;  // whether parts of it read as U+FFFD (InvalidText::kReplace)
};

struct DocumentOptions {
  std::string text_field = "text";  // of JSONL rows; the column of Parquet files
  InvalidText on_invalid = InvalidText::kStop;
  bool skip_bad = false;  // else a document that cannot be read is a UserError
};

// By the hash of its text a document belongs either to the validation data or to the training data.
// Equal texts are on the same side.
struct Split {
  double fraction = 0;    // of the documents that are held out; 0: none
  bool held_out = false;  // take those, and not the others

  bool takes(uint64_t text_hash) const;
};

// Counts the documents that cannot be read and tells the first few; or throws. Threads share one.
class BadDocuments {
 public:
  explicit BadDocuments(bool skip) : skip_(skip) {}

  // `place`: "file" or "file:row". UserError if such documents are not to be skipped.
  void add(const std::string& place, const std::string& reason);
  int64_t count() const { return count_; }

 private:
  const bool skip_;
  std::atomic<int64_t> count_ = 0;
};

}  // namespace longhaul::data
