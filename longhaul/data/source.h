// A corpus on disk: its files, and the units in which they are read. A unit can be read by itself,
// so that units can be read in any order; one whose inside cannot be reached otherwise (compressed
// data) is a whole file. Called by whatever opens a corpus.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "longhaul/data/document.h"
#include "longhaul/data/file_format.h"
#include "longhaul/data/file_list.h"
#include "longhaul/data/token_shard.h"

namespace longhaul::data {

struct SourceFile {
  std::filesystem::path path;
  uint64_t bytes = 0;
  FileFormat format;
  std::optional<PreparedShard> shard = {};  // of prepared tokens
};

struct Unit {
  size_t file = 0;  // index into Sources::files
  // JSONL: the lines that begin in these bytes of the file. Parquet: begin is the row group.
  // Prepared tokens: documents of the shard. Else the whole file.
  uint64_t begin = 0, end = 0;
  uint64_t first_row = 0;   // Parquet: rows of the groups before
  uint64_t disk_bytes = 0;  // its part of the file
  uint64_t text_bytes = 0;  // about; more than disk_bytes where data are compressed
};

struct Sources {
  std::vector<SourceFile> files;
  std::vector<Unit> units;  // in the order of the files
  // What prepared tokens were made with, if there are some.
  std::optional<Vocabulary> vocabulary;

  uint64_t disk_bytes() const;
  uint64_t text_bytes() const;
  bool needs_tokenizer() const;  // whether any file is text
  // Of the files' names and sizes in their order: whether they are the same as before. Not of
  // folders and times, so that a corpus may be moved and copied.
  std::string fingerprint() const;
};

// About this much text makes one unit, where a file can be cut.
inline constexpr uint64_t kUnitBytes = uint64_t{4} << 20;

// The tokenizer's, or, where it is null, the one that prepared tokens were made with.
Vocabulary vocabulary_of(const Sources& sources, const Tokenizer* tokenizer);

// `paths` as for list_files; files of a folder that `longhaul data prepare` made, wherever it
// stands, mean all its shards, once. Files that hold nothing readable at all count as bad
// documents. UserError as list_files, for a folder that is not prepared to the end, and where
// folders were prepared with different tokenizers.
Sources list_sources(const std::string& paths, const DocumentOptions& options, BadDocuments& bad);
Sources list_sources(const std::vector<CorpusFile>& files, const DocumentOptions& options,
                     BadDocuments& bad);

}  // namespace longhaul::data
