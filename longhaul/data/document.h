// A document of a corpus, which of them are taken, and what happens to those that cannot be read.
// Called by the readers of files and by what tokenises them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "longhaul/base/file.h"
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

// `text` as the document's, as it is or repaired. What is wrong with it where it may not be
// repaired, and then the document is as before; else nothing.
std::string take_text(std::string_view text, InvalidText on_invalid, Document& document);

// Counts the documents that cannot be read and tells the first few, then how many there are, each
// time they are ten times as many; or throws. Threads share one.
class BadDocuments {
 public:
  // `most`: so many are a UserError in any case.
  explicit BadDocuments(bool skip, int64_t most = std::numeric_limits<int64_t>::max())
      : skip_(skip), most_(most) {}
  // Of a part: it has its own count, and all else is done by `all`, which counts them, too.
  explicit BadDocuments(BadDocuments* all) : BadDocuments(all->skip_) { all_ = all; }

  // Each one is a line "place: reason" at the end of `file`, too, until end_list(): what is read
  // again is not to stand there again. Where the file cannot be written a warning says so.
  void list_in(std::filesystem::path file);
  // From now on lines are held until list_in(), which writes those that the file does not hold yet:
  // for documents that are found before there is a place for the file.
  void hold_list();
  void end_list();

  using Place = std::function<std::string()>;
  // `place`: "file" or "file:row", and is asked only if it is told; the list takes `cheap_place`,
  // if there is one. UserError if such documents are not to be skipped.
  void add(const Place& place, const std::string& reason, const Place& cheap_place = {});
  int64_t count() const;
  // Those that were added since the count was that are read again.
  void go_back_to(int64_t count);
  // "place: reason" of the first one; empty if there is none.
  std::string first() const;

 private:
  void append(const std::string& line);
  void append_held();

  const bool skip_;
  const int64_t most_;
  BadDocuments* all_ = nullptr;
  mutable std::mutex mutex_;
  int64_t count_ = 0;
  std::string first_;
  std::optional<std::filesystem::path> list_path_;
  std::optional<std::vector<std::string>> held_;
  FileDescriptor list_;  // open from the first one on
};

}  // namespace longhaul::data
