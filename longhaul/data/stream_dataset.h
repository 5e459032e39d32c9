// A corpus as rows in bounded memory: read, tokenised and packed ahead of its reader, chunk by
// chunk (chunk_walk.h). The order depends on the seed and the pass alone, so a row's number is the
// whole position here, too. Each rank reads everything and takes its rows, for where a row begins
// is known only when what is before it was tokenised. Called where a run opens its data.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

#include "longhaul/data/chunk_walk.h"

namespace longhaul::data {

class StreamDataset : public Dataset {
 public:
  // Reads nothing yet. `tokenizer` may be nothing where all sources are prepared tokens. `bad`
  // takes what cannot be read, in each pass anew.
  StreamDataset(Sources sources, const std::optional<Tokenizer>& tokenizer,
                const StreamOptions& options, std::unique_ptr<BadDocuments> bad);

  // Rows are meant to be taken in ascending order: going back reads the data from their start, or
  // from a chunk's whose place is known. UserError for bad documents that are not to be skipped,
  // and for a corpus without text.
  Row row(uint64_t index) const override;
  bool has_row(uint64_t index) const override;
  std::optional<uint64_t> num_rows() const override;
  DatasetInfo info() const override { return {}; }
  DataIdentity identity() const override { return shared_->walk.identity(); }
  int64_t bad_documents() const override { return shared_->walk.bad_documents(); }
  uint64_t rows_in_a_pass() const override;
  RowShape shape() const override { return shape_; }
  std::optional<int64_t> label_bytes(const Row& row) const override;

 private:
  // What the producer's thread and the callers share. All below the mutex, but for the walk, which
  // is the producer's while it reads a chunk.
  struct Shared {
    Shared(Sources sources, const std::optional<Tokenizer>& tokenizer, const StreamOptions& options,
           std::unique_ptr<BadDocuments> bad)
        : walk(std::move(sources), tokenizer, options, std::move(bad)),
          keep_bytes(options.keep_bytes) {}

    ChunkWalk walk;
    const uint64_t keep_bytes;
    std::mutex mutex;
    std::condition_variable_any changed;
    uint64_t wanted = 0;                                    // the row last asked for
    uint64_t next_row = 0;                                  // the walk's
    std::deque<std::shared_ptr<const PackedChunk>> window;  // ascending, without a gap
    std::optional<uint64_t> end;                            // of the data, once it was reached
    std::optional<uint64_t> pass_rows;
    std::exception_ptr failure;

    uint64_t first_row() const { return window.empty() ? next_row : window.front()->first; }
    bool has_work() const;
    std::shared_ptr<const PackedChunk> find(uint64_t row) const;
    void read_next(std::unique_lock<std::mutex>& lock, const std::stop_token& stop);
    void drop_chunks();
    void produce(std::stop_token stop, bool quiet);
  };

  void start() const;
  // Tells now and then how far the producer is, until `found` is true.
  void wait_for(uint64_t row, std::unique_lock<std::mutex>& lock,
                const std::function<bool()>& found) const;
  // The chunk that holds the row; null if the data end before it.
  std::shared_ptr<const PackedChunk> chunk_of(uint64_t row) const;

  const RowShape shape_;
  const bool repeat_;
  const std::unique_ptr<Shared> shared_;
  mutable std::mutex one_at_a_time_;  // of those who wait for rows
  mutable std::jthread producer_;     // started by the first row; last, so that it ends first
};

}  // namespace longhaul::data
