// Learns a byte-level BPE vocabulary from documents and writes it as a tokenizer.json that this
// program and Hugging Face's `tokenizers` load. Ids: the 256 bytes, the merges in the order in
// which they were learnt, the special tokens. The same documents give the same file, in any order.
// Called by the tokenizer command.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace longhaul::data {

struct BpeTrainingOptions {
  int32_t vocab_size = 0;  // bytes, merges and special tokens together
  std::vector<std::string> special_tokens = {"<|endoftext|>"};
  // Cuts text into the pieces within which merges are learnt (Ruby syntax, see regex.h).
  // Contractions, words with one sign in front, up to three digits, signs, line ends, blanks.
  std::string pattern =
      R"('(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*)"
      R"(|\s*[\r\n]+|\s+(?!\S)|\s+)";
  // A pair that occurs less often is not merged; the vocabulary then stays smaller than asked for.
  int64_t min_count = 2;
};

class BpeTrainer {
 public:
  // UserError when vocab_size leaves no room for bytes and special tokens, for one that is empty or
  // not UTF-8, or for a bad pattern.
  explicit BpeTrainer(BpeTrainingOptions options);
  ~BpeTrainer();

  // Counts the pieces of one document; broken UTF-8 is repaired (base/utf8.h).
  void add_document(std::string_view text);

  struct Result {
    std::string json;  // the tokenizer.json
    int32_t vocab_size;
  };
  // Called with merges learnt so far and merges wanted.
  using Progress = std::function<void(int64_t done, int64_t total)>;
  // UserError when no document had any text.
  Result train(const Progress& progress = {}) const;

 private:
  struct Counts;
  BpeTrainingOptions options_;
  std::unique_ptr<Counts> counts_;
};

// The whole in one call.
BpeTrainer::Result train_bpe(const std::vector<std::string>& documents,
                             const BpeTrainingOptions& options,
                             const BpeTrainer::Progress& progress = {});

}  // namespace longhaul::data
