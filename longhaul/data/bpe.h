// Byte pair encoding of one piece: of all neighbours that have a merge, the pair with the lowest
// rank (leftmost first) is joined, again and again. It works on bytes and ids and knows neither
// spelling nor cutting. Called by Tokenizer; the trainer only writes what this reads.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace longhaul::data {

struct Merge {
  int32_t left, right, result;
};

class BpeModel {
 public:
  BpeModel() = default;
  // byte_ids[b]: the token of the single byte b, or -1 where the vocabulary has none.
  // token_lengths[id]: bytes of each token. merges: in the order of their rank.
  BpeModel(std::array<int32_t, 256> byte_ids, std::vector<uint32_t> token_lengths,
           std::vector<Merge> merges);

  // Buffers that are used again from piece to piece; one for each thread.
  struct Scratch {
    std::vector<int32_t> ids, ranks, slots;
    std::unordered_map<int32_t, std::vector<uint32_t>> waiting;  // rank -> places
  };

  // Appends the tokens of `piece`; UserError for a byte without a token. Time is about linear in
  // the length, whatever the piece: short ones are searched, long ones keep their places by rank.
  void encode(std::string_view piece, Scratch& scratch, std::vector<int32_t>& out) const;

  static constexpr size_t kLongPiece = 128;  // bytes

 private:
  int32_t rank_of(int32_t left, int32_t right) const;
  int32_t byte_id(char byte) const;
  void encode_short(std::string_view piece, Scratch& scratch, std::vector<int32_t>& out) const;
  void encode_long(std::string_view piece, Scratch& scratch, std::vector<int32_t>& out) const;

  friend class LongPiece;

  struct Slot {
    uint64_t pair;
    int32_t rank;
  };
  std::array<int32_t, 256> byte_ids_{};
  std::vector<uint32_t> token_lengths_;
  std::vector<Merge> merges_;
  std::vector<Slot> table_;  // open addressing; a power of two
};

}  // namespace longhaul::data
