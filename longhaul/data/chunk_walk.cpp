#include "longhaul/data/chunk_walk.h"

#include <algorithm>
#include <numeric>
#include <tuple>

#include "longhaul/base/error.h"
#include "longhaul/base/hash.h"
#include "longhaul/base/log.h"
#include "longhaul/base/rng.h"
#include "longhaul/base/text.h"
#include "longhaul/data/best_fit_dataset.h"

namespace longhaul::data {
namespace {

std::vector<uint32_t> in_order(size_t count) {
  std::vector<uint32_t> order(count);
  std::iota(order.begin(), order.end(), uint32_t{0});
  return order;
}

}  // namespace

ChunkWalk::ChunkWalk(Sources sources, const std::optional<Tokenizer>& tokenizer,
                     const StreamOptions& options, std::unique_ptr<BadDocuments> bad)
    : sources_(std::move(sources)),
      options_(options),
      bad_(std::move(bad)),
      bad_files_(bad_->count()),
      vocabulary_(vocabulary_of(sources_, tokenizer ? &*tokenizer : nullptr)),
      encoders_(tokenizer ? std::make_unique<TextEncoders>(*tokenizer, options.num_threads)
                          : nullptr),
      context_{.sources = sources_, .encoders = encoders_.get(), .bad = *bad_},
      groups_(deal_units()),
      counts_(groups_.size(), options.row_counts, fingerprint()) {}

std::vector<std::vector<size_t>> ChunkWalk::deal_units() const {
  const size_t count = sources_.units.size();
  const auto order = options_.packing.shuffle
                         ? shuffled(count, options_.packing.seed, "data.stream.units")
                         : in_order(count);
  // Of a group's text the split leaves one chunk.
  const auto [fraction, held_out] = options_.chunks.split;
  const double share = std::max(held_out ? fraction : 1 - fraction, 1e-6);
  const auto group_bytes =
      static_cast<uint64_t>(static_cast<double>(options_.chunks.chunk_bytes) / share);
  std::vector<std::vector<size_t>> groups;
  uint64_t room = 0;
  for (const uint32_t unit : order) {
    if (room == 0) {
      groups.emplace_back();
      room = group_bytes;
    }
    groups.back().push_back(unit);
    room -= std::min(room, sources_.units[unit].text_bytes);
  }
  return groups;
}

DataIdentity ChunkWalk::identity() const {
  return {.tokenizer = vocabulary_.fingerprint, .files = sources_.fingerprint()};
}

// Of all that the number of rows in a chunk depends on. Whether bad documents are skipped is not
// among it: chunks that were counted while they were an error have none.
std::string ChunkWalk::fingerprint() const {
  const auto& [packing, chunks] = std::tie(options_.packing, options_.chunks);
  const auto& documents = chunks.documents;
  std::string text;
  for (const auto& file : sources_.files) {
    text += fmt::format("{} {}\n", file.path.string(), file.bytes);
  }
  text += fmt::format("{}\n", vocabulary_.fingerprint);
  text += fmt::format("{} {} {} {}\n", packing.shape.seq_len, packing.best_fit,
                      packing.shuffle ? packing.seed : 0, packing.shuffle);
  text += fmt::format("{} {} {} {} {} {}\n", documents.text_field,
                      static_cast<int>(documents.on_invalid), chunks.split.fraction,
                      chunks.split.held_out, chunks.chunk_bytes, kUnitBytes);
  return "longhaul rows " + hash_hex(text);
}

void ChunkWalk::restart() {
  cursor_ = {};
  order_.clear();
  bad_->end_list();
  told_bad_ = bad_->count() - bad_files_;  // those that were read are read and counted again
}

std::optional<PackedChunk> ChunkWalk::next(uint64_t wanted, std::stop_token stop) {
  context_.stop = std::move(stop);
  while (true) {
    if (context_.stop.stop_requested()) throw Stopped("the reading was called off");
    if (order_.empty() || cursor_.place == groups_.size()) {
      if (!begin_pass(wanted)) return std::nullopt;
    }
    const size_t group = order_[cursor_.place];
    if (skip_group(group, wanted) || skip_chunk(group, wanted)) continue;
    if (auto chunk = read_chunk(group)) return chunk;
  }
}

// The first pass, or the one behind that whose groups are all done. False if there is none.
bool ChunkWalk::begin_pass(uint64_t wanted) {
  if (!order_.empty()) {
    if (cursor_.row == cursor_.pass_row) {
      fail_user("the data have no document to learn from: all are bad, empty or too short ({} bad)",
                bad_->count());
    }
    end_pass();
    if (!options_.packing.repeat) return false;
    ++cursor_.pass;
    cursor_.place = 0;
    cursor_.pass_row = cursor_.row;
  }
  if (groups_.empty()) fail_user("the data have no readable file ({} bad)", bad_->count());
  const auto rows = counts_.rows_of_all();
  if (options_.packing.repeat && rows && *rows > 0 && wanted >= cursor_.row + *rows) {
    const uint64_t passes = (wanted - cursor_.row) / *rows;
    cursor_.pass += passes;
    cursor_.row += passes * *rows;
    cursor_.pass_row = cursor_.row;
  }
  order_ = options_.packing.shuffle ? shuffled(groups_.size(), options_.packing.seed,
                                               fmt::format("data.stream.pass.{}", cursor_.pass))
                                    : in_order(groups_.size());
  return true;
}

// Of the reading, which is ahead of the trainer.
void ChunkWalk::end_pass() {
  const int64_t bad = bad_->count();
  if (bad > told_bad_) {
    log::warn("a pass through the data has been read; {} bad documents were left out",
              with_commas(bad - told_bad_));
  }
  bad_->end_list();
  told_bad_ = bad - bad_files_;
}

bool ChunkWalk::skip_group(size_t group, uint64_t wanted) {
  const auto rows = counts_.rows_of_group(group);
  if (cursor_.reader || !rows || cursor_.row + *rows > wanted) return false;
  cursor_.row += *rows;
  ++cursor_.place;
  return true;
}

bool ChunkWalk::skip_chunk(size_t group, uint64_t wanted) {
  if (!cursor_.reader) {
    cursor_.reader = std::make_unique<ChunkReader>(context_, groups_[group], options_.chunks);
  }
  const auto rows = counts_.rows_of_chunk(group, cursor_.chunk);
  if (!rows || cursor_.row + *rows > wanted) return false;
  if (!cursor_.reader->skip()) {
    fail_user(
        "the data have less text than when this run read them before; go back to the data as they "
        "were, or start anew");
  }
  cursor_.row += *rows;
  ++cursor_.chunk;
  return true;
}

std::optional<PackedChunk> ChunkWalk::read_chunk(size_t group) {
  TokenizedCorpus corpus;
  if (!cursor_.reader->next(corpus)) {
    end_group(group);
    return std::nullopt;
  }
  PackedChunk chunk{.first = cursor_.row, .end = cursor_.row, .rows = nullptr};
  // A single token predicts nothing.
  if (corpus.ids.size() > 1) {
    chunk.rows = pack_chunk(std::move(corpus), group);
    chunk.end += chunk.rows->rows_in_a_pass();
  }
  counts_.add_chunk(group, cursor_.chunk++, chunk.end - chunk.first);
  cursor_.row = chunk.end;
  if (!chunk.rows) return std::nullopt;
  return chunk;
}

void ChunkWalk::end_group(size_t group) {
  counts_.end_group(group, cursor_.chunk);
  cursor_.reader.reset();
  cursor_.chunk = 0;
  ++cursor_.place;
}

std::unique_ptr<Dataset> ChunkWalk::pack_chunk(TokenizedCorpus corpus, size_t group) const {
  PackingOptions packing = options_.packing;
  packing.repeat = false;
  packing.seed =
      stable_hash(fmt::format("{} {} {} {}", packing.seed, cursor_.pass, group, cursor_.chunk));
  return pack(std::move(corpus), packing);
}

}  // namespace longhaul::data
