#include "longhaul/data/bpe.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <queue>

#include "longhaul/base/error.h"

namespace longhaul::data {
namespace {

constexpr int32_t kNoRank = std::numeric_limits<int32_t>::max();
constexpr uint64_t kEmpty = ~uint64_t{0};

uint64_t key_of(int32_t left, int32_t right) {
  return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
}

size_t bucket_of(uint64_t key, size_t mask) {
  return static_cast<size_t>((key * 0x9E3779B97F4A7C15u) >> 20) & mask;
}

}  // namespace

BpeModel::BpeModel(std::array<int32_t, 256> byte_ids, std::vector<uint32_t> token_lengths,
                   std::vector<Merge> merges)
    : byte_ids_(byte_ids), token_lengths_(std::move(token_lengths)), merges_(std::move(merges)) {
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

int32_t BpeModel::byte_id(char byte) const {
  const int32_t id = byte_ids_[static_cast<uint8_t>(byte)];
  if (id < 0) {
    fail_user("the tokenizer's vocabulary has no token for the byte 0x{:02x} of the text",
              static_cast<uint8_t>(byte));
  }
  return id;
}

void BpeModel::encode(std::string_view piece, Scratch& scratch, std::vector<int32_t>& out) const {
  piece.size() < kLongPiece ? encode_short(piece, scratch, out) : encode_long(piece, scratch, out);
}

void BpeModel::encode_short(std::string_view piece, Scratch& scratch,
                            std::vector<int32_t>& out) const {
  auto& ids = scratch.ids;
  auto& ranks = scratch.ranks;  // ranks[i]: of the pair (i, i + 1)
  ids.clear();
  for (const char byte : piece) ids.push_back(byte_id(byte));
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

// A long piece as one slot a byte. The slot of a token's first byte holds its id; of a token of
// several bytes the last slot holds minus its length and those between hold anything negative. So
// both neighbours of a token are found in constant time with 4 bytes of memory a byte of text.
class LongPiece {
 public:
  LongPiece(const BpeModel& model, std::string_view piece, BpeModel::Scratch& scratch)
      : model_(model), slots_(scratch.slots), waiting_(scratch.waiting) {
    waiting_.clear();
    slots_.resize(piece.size());
    for (size_t i = 0; i < piece.size(); ++i) slots_[i] = model.byte_id(piece[i]);
    for (size_t i = 0; i + 1 < piece.size(); ++i) push(i, model.rank_of(slots_[i], slots_[i + 1]));
  }

  void merge_all() {
    while (!ranks_.empty()) {
      const int32_t rank = ranks_.top();
      ranks_.pop();
      merge_rank(rank);
    }
  }

  void append_to(std::vector<int32_t>& out) const {
    for (size_t at = 0; at < slots_.size(); at += length(at)) out.push_back(slots_[at]);
  }

 private:
  size_t length(size_t at) const { return model_.token_lengths_[static_cast<size_t>(slots_[at])]; }

  size_t before(size_t at) const {
    const int32_t last = slots_[at - 1];
    return last >= 0 ? at - 1 : at - static_cast<size_t>(-last);
  }

  void push(size_t at, int32_t rank) {
    if (rank == kNoRank) return;
    auto& places = waiting_[rank];
    if (places.empty()) ranks_.push(rank);
    places.push_back(static_cast<uint32_t>(at));
    lowest_pushed_ = std::min(lowest_pushed_, rank);
  }

  // Joins the pairs of one rank from left to right; steps back where a join made a lower rank.
  void merge_rank(int32_t rank) {
    std::vector<uint32_t> places = std::move(waiting_[rank]);
    waiting_[rank].clear();
    if (!std::is_sorted(places.begin(), places.end())) std::sort(places.begin(), places.end());
    lowest_pushed_ = kNoRank;
    for (size_t i = 0; i < places.size(); ++i) {
      join(places[i], model_.merges_[static_cast<size_t>(rank)]);
      if (lowest_pushed_ < rank) {
        for (size_t rest = i + 1; rest < places.size(); ++rest) push(places[rest], rank);
        return;
      }
    }
  }

  void join(size_t at, const Merge& merge) {
    if (slots_[at] != merge.left) return;  // joined with something else meanwhile
    const size_t middle = at + length(at);
    if (middle >= slots_.size() || slots_[middle] != merge.right) return;
    const size_t end = middle + length(middle);
    slots_[middle] = -1;
    slots_[end - 1] = -static_cast<int32_t>(end - at);
    slots_[at] = merge.result;
    if (at > 0) push(before(at), model_.rank_of(slots_[before(at)], merge.result));
    if (end < slots_.size()) push(at, model_.rank_of(merge.result, slots_[end]));
  }

  const BpeModel& model_;
  std::vector<int32_t>& slots_;
  std::unordered_map<int32_t, std::vector<uint32_t>>& waiting_;
  std::priority_queue<int32_t, std::vector<int32_t>, std::greater<>> ranks_;
  int32_t lowest_pushed_ = kNoRank;
};

void BpeModel::encode_long(std::string_view piece, Scratch& scratch,
                           std::vector<int32_t>& out) const {
  if (piece.size() > std::numeric_limits<int32_t>::max()) {
    fail_user("a piece of {} bytes without a place to cut is too long for the tokenizer (2 GiB)",
              piece.size());
  }
  LongPiece long_piece(*this, piece, scratch);
  long_piece.merge_all();
  long_piece.append_to(out);
}

}  // namespace longhaul::data
