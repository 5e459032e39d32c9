#include "longhaul/data/bpe.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <limits>

#include "longhaul/base/error.h"

namespace longhaul::data {
namespace {

constexpr int32_t kNoRank = std::numeric_limits<int32_t>::max();
constexpr int32_t kNone = -1;  // an id that no token has
constexpr uint64_t kEmpty = ~uint64_t{0};

uint64_t key_of(int32_t left, int32_t right) {
  return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
}

size_t bucket_of(uint64_t key, size_t mask) {
  return static_cast<size_t>((key * 0x9E3779B97F4A7C15u) >> 20) & mask;
}

}  // namespace

BpeModel::BpeModel(std::vector<Merge> merges) : merges_(std::move(merges)) {
  table_.assign(std::bit_ceil(merges_.size() * 2 + 2), {kEmpty, kNoRank});
  const size_t mask = table_.size() - 1;
  for (size_t rank = 0; rank < merges_.size(); ++rank) {
    const uint64_t key = key_of(merges_[rank].left, merges_[rank].right);
    size_t at = bucket_of(key, mask);
    while (table_[at].pair != kEmpty && table_[at].pair != key) at = (at + 1) & mask;
    table_[at] = {key, static_cast<int32_t>(rank)};  // of two equal merges the later one counts
  }
}

int32_t BpeModel::rank_of(int32_t left, int32_t right) const {
  const uint64_t key = key_of(left, right);
  const size_t mask = table_.size() - 1;
  for (size_t at = bucket_of(key, mask);; at = (at + 1) & mask) {
    if (table_[at].pair == key) return table_[at].rank;
    if (table_[at].pair == kEmpty) return kNoRank;
  }
}

// A long piece as one slot a symbol: the slot of a token's first symbol holds its id, the others
// kNone. Both its first and its last slot have the number of its symbols in `lengths`, so that both
// neighbours of a token are found in constant time. Pairs wait in a heap by rank and place.
class LongPiece {
 public:
  LongPiece(const BpeModel& model, BpeModel::Scratch& scratch)
      : model_(model), ids_(scratch.ids), lengths_(scratch.lengths), heap_(scratch.heap) {
    if (ids_.size() > std::numeric_limits<uint32_t>::max()) {
      fail_user("a piece of {} symbols without a place to cut is too long for the tokenizer",
                ids_.size());
    }
    heap_.clear();
    lengths_.assign(ids_.size(), 1);
    for (size_t i = 0; i + 1 < ids_.size(); ++i) {
      const int32_t rank = model.rank_of(ids_[i], ids_[i + 1]);
      if (rank != kNoRank) heap_.push_back(entry(rank, i));
    }
    std::make_heap(heap_.begin(), heap_.end(), std::greater<>());
  }

  void merge_all() {
    while (!heap_.empty()) {
      std::pop_heap(heap_.begin(), heap_.end(), std::greater<>());
      const uint64_t lowest = heap_.back();
      heap_.pop_back();
      join(static_cast<uint32_t>(lowest), model_.merges_[lowest >> 32]);
    }
  }

  void append_to(std::vector<int32_t>& out) const {
    for (size_t at = 0; at < ids_.size(); at += lengths_[at]) out.push_back(ids_[at]);
  }

 private:
  static uint64_t entry(int32_t rank, size_t at) { return static_cast<uint64_t>(rank) << 32 | at; }
  size_t before(size_t at) const { return at - lengths_[at - 1]; }

  void push(size_t left, size_t right) {
    const int32_t rank = model_.rank_of(ids_[left], ids_[right]);
    if (rank == kNoRank) return;
    heap_.push_back(entry(rank, left));
    std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
  }

  void join(size_t at, const Merge& merge) {
    if (ids_[at] != merge.left) return;  // joined with something else meanwhile
    const size_t middle = at + lengths_[at];
    if (middle >= ids_.size() || ids_[middle] != merge.right) return;
    const size_t end = middle + lengths_[middle];
    ids_[middle] = kNone;
    lengths_[at] = lengths_[end - 1] = static_cast<uint32_t>(end - at);
    ids_[at] = merge.result;
    if (at > 0) push(before(at), at);
    if (end < ids_.size()) push(at, end);
  }

  const BpeModel& model_;
  std::vector<int32_t>& ids_;
  std::vector<uint32_t>& lengths_;
  std::vector<uint64_t>& heap_;
};

void BpeModel::encode(Scratch& scratch, std::vector<int32_t>& out) const {
  if (scratch.ids.size() < kLongPiece) return encode_short(scratch, out);
  LongPiece long_piece(*this, scratch);
  long_piece.merge_all();
  long_piece.append_to(out);
}

void BpeModel::encode_short(Scratch& scratch, std::vector<int32_t>& out) const {
  auto& ids = scratch.ids;
  auto& ranks = scratch.ranks;  // ranks[i]: of the pair (i, i + 1)
  ranks.clear();
  for (size_t i = 0; i + 1 < ids.size(); ++i) ranks.push_back(rank_of(ids[i], ids[i + 1]));
  while (!ranks.empty()) {
    const auto lowest = std::min_element(ranks.begin(), ranks.end());
    if (*lowest == kNoRank) break;
    const auto at = static_cast<size_t>(lowest - ranks.begin());
    ids[at] = merges_[static_cast<size_t>(*lowest)].result;
    ids.erase(ids.begin() + static_cast<ptrdiff_t>(at) + 1);
    ranks.erase(lowest);
    if (at > 0) ranks[at - 1] = rank_of(ids[at - 1], ids[at]);
    if (at + 1 < ids.size()) ranks[at] = rank_of(ids[at], ids[at + 1]);
  }
  out.insert(out.end(), ids.begin(), ids.end());
}

}  // namespace longhaul::data
