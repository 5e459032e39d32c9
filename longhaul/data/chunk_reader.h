// Units of a corpus as chunks of tokenised documents: read one behind the other, in order, and
// tokenised on several threads. Holds one chunk's text at a time. Called by what reads a corpus
// whole (corpus.h) and as a stream (stream_dataset.h).
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <stop_token>
#include <vector>

#include "longhaul/base/error.h"
#include "longhaul/data/dataset.h"
#include "longhaul/data/document_reader.h"
#include "longhaul/data/source.h"
#include "longhaul/data/tokenizer.h"

namespace longhaul::data {

struct TokenizedCorpus {
  std::vector<int32_t> ids;             // all documents, one behind the other
  std::vector<uint64_t> document_ends;  // places in ids; ascending
  std::vector<uint64_t> text_hashes;    // of each document; only if they were asked for
  std::vector<uint32_t> token_bytes;    // text bytes of each id of the vocabulary; may be empty
  DataIdentity identity = {};
  int64_t text_bytes = 0;
  int64_t empty_documents = 0;     // skipped
  int64_t replaced_documents = 0;  // not valid text, and repaired
};

// A tokenizer's state for several threads.
class TextEncoders {
 public:
  // UserError if the tokenizer has no end-of-text token.
  TextEncoders(const Tokenizer& tokenizer, int num_threads);

  // The ids of each text that is not null; of a null one, none.
  std::vector<std::vector<int32_t>> encode(std::span<const std::string* const> texts);
  int32_t end_of_text() const { return end_of_text_; }

 private:
  std::vector<Encoder> encoders_;
  int32_t end_of_text_;
};

// What the reading that was called off throws.
class Stopped : public Error {
 public:
  using Error::Error;
};

struct ChunkOptions {
  DocumentOptions documents = {};
  Split split = {};
  uint64_t chunk_bytes = uint64_t{32} << 20;  // of text, about; at least one document
  bool keep_hashes = false;
};

class ChunkReader {
 public:
  // What the readers of one corpus share, and which outlives them. One thread's at a time, but for
  // bytes_read.
  struct Context {
    const Sources& sources;
    TextEncoders* encoders;  // null where all units are prepared tokens
    BadDocuments& bad;
    std::stop_token stop = {};             // calls the reading off
    std::set<size_t> sound_files = {};     // prepared shards whose checksum was compared
    std::atomic<uint64_t> bytes_read = 0;  // on the disk
  };
  ChunkReader(Context& context, std::vector<size_t> units, const ChunkOptions& options);

  // Appends the next chunk to `corpus`. False if there is none. UserError for bad documents that
  // are not to be skipped, and for damaged shards: each is compared with its checksum when it is
  // first opened. Stopped.
  bool next(TokenizedCorpus& corpus);
  // Leaves the next chunk out, without tokenising it.
  bool skip();
  // Bytes on the disk that were read so far.
  uint64_t consumed() const;

 private:
  // A document: its text, or its ids where they are prepared.
  struct Item {
    Document document;
    std::optional<TokenShard> shard;  // keeps mapped what `ids` looks at
    std::span<const int32_t> ids;
    uint64_t hash = 0;
  };
  struct TokenUnit {
    TokenShard shard;
    const SourceFile* file;
    uint64_t next, end;  // documents
  };

  bool fill();
  bool open_next_unit();
  void open_tokens(size_t number, const Unit& unit);
  void count_bytes();
  bool read_item(Item& item);
  bool read_tokens(Item& item);
  void append(const Item& item, const std::vector<int32_t>& ids, TokenizedCorpus& corpus) const;

  Context& context_;
  const std::vector<size_t> units_;
  const ChunkOptions options_;
  size_t next_unit_ = 0;
  std::unique_ptr<DocumentReader> reader_;  // of the unit that is open, if it is text
  std::unique_ptr<TokenUnit> tokens_;       // if it is tokens
  uint64_t consumed_before_ = 0, counted_ = 0;
  std::vector<Item> items_;
};

}  // namespace longhaul::data
