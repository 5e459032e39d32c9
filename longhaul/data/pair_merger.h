// The counting inside BPE training: all pieces as one sequence of tokens, every pair of neighbours
// with its count and its places. Merging a pair costs time in proportion to its places. Internal to
// the trainer.
#pragma once

#include <cstdint>
#include <optional>
#include <queue>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace longhaul::data {

struct TokenPair {
  int32_t left, right;
};

class PairMerger {
 public:
  // byte_ids[b] is the token of byte b.
  explicit PairMerger(const std::vector<int32_t>& byte_ids) : byte_ids_(byte_ids) {}

  // A piece that occurs `count` times. All pieces come before the first call of most_frequent.
  void add_piece(std::string_view piece, int64_t count);

  // The pair with the highest count (ties: the lowest left id, then the lowest right id), taken out
  // of the running; nullopt when none occurs min_count times.
  std::optional<TokenPair> most_frequent(int64_t min_count);

  // Replaces `pair` by `token` everywhere. `length`: the bytes of the new token.
  void merge(TokenPair pair, int32_t token, uint32_t length);

 private:
  struct Pair {
    int64_t count = 0;
    std::vector<uint32_t> places;
  };
  struct Candidate {
    int64_t count;
    uint64_t key;
    bool operator<(const Candidate& other) const {
      return count != other.count ? count < other.count : key > other.key;
    }
  };

  void count_all_pairs();
  void change(int32_t left, int32_t right, int64_t by, uint32_t place);
  void join(uint32_t at, TokenPair pair, int32_t token);
  uint32_t length(uint32_t at) const;
  uint32_t before(uint32_t at) const;

  std::vector<int32_t> byte_ids_;
  std::vector<uint32_t> lengths_;  // bytes of each token; 0: not seen yet, that is, a byte
  // One slot a byte, as in bpe.cpp: the first holds the token's id, the last minus its length.
  std::vector<int32_t> slots_;
  std::vector<uint32_t> piece_of_slot_;
  std::vector<uint32_t> piece_begin_ = {0};
  std::vector<int64_t> piece_count_;
  std::unordered_map<uint64_t, Pair> pairs_;
  std::vector<uint64_t> grown_;  // pairs whose count rose in the current merge
  std::priority_queue<Candidate> candidates_;
};

}  // namespace longhaul::data
