// The chunks of a stream one after another, over all passes, from any row on. One thread's; see
// stream_dataset.h, which alone calls it.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "longhaul/data/chunk_reader.h"
#include "longhaul/data/packed_dataset.h"
#include "longhaul/data/row_counts.h"

namespace longhaul::data {

struct StreamOptions {
  PackingOptions packing;
  ChunkOptions chunks = {};
  int num_threads = 2;  // that tokenise
  // Chunks whose rows were given stay, as far as their ids have room here, so that going back to
  // them reads nothing anew.
  uint64_t keep_bytes = 0;
  // Where row counts are kept from one run to the next.
  std::optional<RowCountsFile> row_counts = {};
};

// Rows [first, end) of the endless sequence.
struct PackedChunk {
  uint64_t first = 0, end = 0;
  std::unique_ptr<Dataset> rows;  // numbered from 0
};

// Units are dealt into groups, at random with options.packing.shuffle; a group is a chunk, or
// several where a unit is larger. A pass takes the groups in an order of its own. Each chunk is
// packed by itself, its last row padded.
class ChunkWalk {
 public:
  ChunkWalk(Sources sources, const std::optional<Tokenizer>& tokenizer,
            const StreamOptions& options, std::unique_ptr<BadDocuments> bad);

  // The next chunk, or a later one: chunks that end at or before row `wanted` are left out where
  // their rows are known. Nothing at the end of the data. UserError if a pass has no rows at all;
  // Stopped when `stop` says so.
  std::optional<PackedChunk> next(uint64_t wanted, std::stop_token stop);
  // Goes back to the first row.
  void restart();

  // The first row of the next chunk.
  uint64_t row() const { return cursor_.row; }
  // Known when all groups were read.
  std::optional<uint64_t> rows_in_a_pass() const { return counts_.rows_of_all(); }
  const std::vector<uint32_t>& token_bytes() const { return vocabulary_.token_bytes; }
  DataIdentity identity() const;
  // In all passes; one that was read again counts again. Any thread may ask.
  int64_t bad_documents() const { return bad_->count(); }
  // Of the disk, in all passes. Any thread may ask.
  uint64_t bytes_read() const { return context_.bytes_read; }

 private:
  struct Cursor {
    uint64_t pass = 0, pass_row = 0;  // the pass's first row
    size_t place = 0;                 // in the pass's order of groups
    size_t chunk = 0;                 // in the group
    uint64_t row = 0;
    std::unique_ptr<ChunkReader> reader;  // of the group, behind the chunks before
  };

  std::vector<std::vector<size_t>> deal_units() const;
  std::string fingerprint() const;
  bool begin_pass(uint64_t wanted);
  void end_pass();
  bool skip_group(size_t group, uint64_t wanted);
  bool skip_chunk(size_t group, uint64_t wanted);
  std::optional<PackedChunk> read_chunk(size_t group);
  void end_group(size_t group);
  std::unique_ptr<Dataset> pack_chunk(TokenizedCorpus corpus, size_t group) const;

  const Sources sources_;
  const StreamOptions options_;
  const std::unique_ptr<BadDocuments> bad_;
  const int64_t bad_files_;  // were found when the files were listed, and no pass reads them
  const Vocabulary vocabulary_;
  const std::unique_ptr<TextEncoders> encoders_;
  ChunkReader::Context context_;
  const std::vector<std::vector<size_t>> groups_;  // units of each
  RowCounts counts_;
  std::vector<uint32_t> order_;  // of the groups in the cursor's pass
  Cursor cursor_;
  int64_t told_bad_ = 0;
};

}  // namespace longhaul::data
