// Byte pair encoding of one piece: of all neighbours that have a merge, the pair with the lowest
// rank (leftmost first) is joined, again and again. It works on ids and knows neither spelling nor
// cutting. Called by Tokenizer; the trainer only writes what this reads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace longhaul::data {

struct Merge {
  int32_t left, right, result;
};

class BpeModel {
 public:
  BpeModel() = default;
  // merges: in the order of their rank.
  explicit BpeModel(std::vector<Merge> merges);

  // Buffers that are used again from piece to piece; one for each thread.
  struct Scratch {
    std::vector<int32_t> ids;  // the symbols of the piece
    std::vector<int32_t> ranks;
    std::vector<uint32_t> lengths;
    std::vector<uint64_t> heap;
  };

  // Appends the tokens of the symbols in scratch.ids, which it uses up. Time is about linear in
  // their number, whatever they are: few are searched, many wait in a heap.
  void encode(Scratch& scratch, std::vector<int32_t>& out) const;

  static constexpr size_t kLongPiece = 128;  // symbols

 private:
  int32_t rank_of(int32_t left, int32_t right) const;
  void encode_short(Scratch& scratch, std::vector<int32_t>& out) const;

  friend class LongPiece;

  struct Slot {
    uint64_t pair;
    int32_t rank;
  };
  std::vector<Merge> merges_;
  std::vector<Slot> table_;  // open addressing; a power of two
};

}  // namespace longhaul::data
