#include "longhaul/data/pair_merger.h"

#include <algorithm>
#include <limits>

#include "longhaul/base/error.h"

namespace longhaul::data {
namespace {

uint64_t key_of(int32_t left, int32_t right) {
  return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
}

TokenPair pair_of(uint64_t key) {
  return {static_cast<int32_t>(key >> 32), static_cast<int32_t>(key)};
}

}  // namespace

void PairMerger::add_piece(std::string_view piece, int64_t count) {
  if (piece.size() + slots_.size() > std::numeric_limits<int32_t>::max()) {
    fail_user("the different words of the documents take more than 2 GiB: train on fewer of them");
  }
  for (const char byte : piece) slots_.push_back(byte_ids_[static_cast<uint8_t>(byte)]);
  piece_of_slot_.insert(piece_of_slot_.end(), piece.size(),
                        static_cast<uint32_t>(piece_count_.size()));
  piece_begin_.push_back(static_cast<uint32_t>(slots_.size()));
  piece_count_.push_back(count);
}

void PairMerger::count_all_pairs() {
  for (uint32_t at = 0; at + 1 < slots_.size(); ++at) {
    if (piece_of_slot_[at] != piece_of_slot_[at + 1]) continue;
    change(slots_[at], slots_[at + 1], piece_count_[piece_of_slot_[at]], at);
  }
  grown_.clear();
  for (const auto& [key, pair] : pairs_) candidates_.push({pair.count, key});
}

void PairMerger::change(int32_t left, int32_t right, int64_t by, uint32_t place) {
  const uint64_t key = key_of(left, right);
  Pair& pair = pairs_[key];
  pair.count += by;
  if (by > 0) {
    pair.places.push_back(place);
    grown_.push_back(key);
  }
}

std::optional<TokenPair> PairMerger::most_frequent(int64_t min_count) {
  if (pairs_.empty()) count_all_pairs();
  while (!candidates_.empty()) {
    const Candidate best = candidates_.top();
    candidates_.pop();
    const auto pair = pairs_.find(best.key);
    const int64_t count = pair == pairs_.end() ? 0 : pair->second.count;
    if (count == best.count) {
      if (count < min_count) return std::nullopt;
      return pair_of(best.key);
    }
    // A count that fell comes back in its place; one that rose has a newer candidate already.
    if (count < best.count && count > 0) candidates_.push({count, best.key});
  }
  return std::nullopt;
}

uint32_t PairMerger::length(uint32_t at) const {
  const auto id = static_cast<size_t>(slots_[at]);
  return id < lengths_.size() && lengths_[id] != 0 ? lengths_[id] : 1;
}

uint32_t PairMerger::before(uint32_t at) const {
  const int32_t last = slots_[at - 1];
  return last >= 0 ? at - 1 : at - static_cast<uint32_t>(-last);
}

void PairMerger::merge(TokenPair pair, int32_t token, uint32_t length) {
  lengths_.resize(std::max(lengths_.size(), static_cast<size_t>(token) + 1));
  lengths_[static_cast<size_t>(token)] = length;
  const auto found = pairs_.find(key_of(pair.left, pair.right));
  LONGHAUL_CHECK(found != pairs_.end(), "pair ({}, {}) is unknown", pair.left, pair.right);
  std::vector<uint32_t> places = std::move(found->second.places);
  std::sort(places.begin(), places.end());
  for (const uint32_t at : places) join(at, pair, token);
  pairs_.erase(key_of(pair.left, pair.right));
  std::sort(grown_.begin(), grown_.end());
  grown_.erase(std::unique(grown_.begin(), grown_.end()), grown_.end());
  for (const uint64_t key : grown_) {
    const auto grown = pairs_.find(key);
    if (grown != pairs_.end()) candidates_.push({grown->second.count, key});
  }
  grown_.clear();
}

void PairMerger::join(uint32_t at, TokenPair pair, int32_t token) {
  const uint32_t piece = piece_of_slot_[at];
  const uint32_t piece_end = piece_begin_[piece + 1];
  if (slots_[at] != pair.left) return;  // a neighbour took it
  const uint32_t middle = at + length(at);
  if (middle >= piece_end || slots_[middle] != pair.right) return;
  const uint32_t end = middle + length(middle);
  const int64_t count = piece_count_[piece];
  const bool first = at == piece_begin_[piece];
  const uint32_t previous = first ? at : before(at);
  if (!first) change(slots_[previous], pair.left, -count, previous);
  if (end < piece_end) change(pair.right, slots_[end], -count, middle);
  slots_[middle] = -1;
  slots_[end - 1] = -static_cast<int32_t>(end - at);
  slots_[at] = token;
  if (!first) change(slots_[previous], token, count, previous);
  if (end < piece_end) change(token, slots_[end], count, at);
}

}  // namespace longhaul::data
