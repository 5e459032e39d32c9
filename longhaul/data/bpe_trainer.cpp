#include "longhaul/data/bpe_trainer.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <unordered_map>

#include "longhaul/base/error.h"
#include "longhaul/base/utf8.h"
#include "longhaul/data/byte_alphabet.h"
#include "longhaul/data/pair_merger.h"
#include "longhaul/data/piece_cutter.h"
#include "longhaul/data/string_ids.h"
#include "longhaul/data/utf8.h"

namespace longhaul::data {
namespace {

using nlohmann::ordered_json;

ordered_json byte_level() {
  return {{"type", "ByteLevel"},
          {"add_prefix_space", false},
          {"trim_offsets", true},
          {"use_regex", false}};
}

ordered_json pre_tokenizer_of(const std::string& pattern) {
  const ordered_json split = {{"type", "Split"},
                              {"pattern", {{"Regex", pattern}}},
                              {"behavior", "Isolated"},
                              {"invert", false}};
  return {{"type", "Sequence"}, {"pretokenizers", ordered_json::array({split, byte_level()})}};
}

// The vocabulary as it grows: spelled tokens by id, and the merges.
class Vocabulary {
 public:
  Vocabulary() {
    for (const uint8_t byte : bytes_in_alphabet_order()) {
      add(to_byte_alphabet(std::string(1, static_cast<char>(byte))), 1);
    }
  }

  static std::vector<int32_t> byte_ids() {
    std::vector<int32_t> ids(256);
    int32_t next = 0;
    for (const uint8_t byte : bytes_in_alphabet_order()) ids[byte] = next++;
    return ids;
  }

  int32_t size() const { return static_cast<int32_t>(spelled_.size()); }
  uint32_t length(int32_t id) const { return lengths_[static_cast<size_t>(id)]; }
  std::string joined(TokenPair pair) const { return spelling(pair.left) + spelling(pair.right); }

  int32_t add(const std::string& spelled, uint32_t length) {
    const auto [entry, is_new] = ids_.emplace(spelled, size());
    if (is_new) {
      spelled_.push_back(spelled);
      lengths_.push_back(length);
    }
    return entry->second;
  }

  // Two pairs may spell the same token; then it has two merges and one id.
  int32_t add_merge(TokenPair pair) {
    merges_.push_back(spelling(pair.left) + " " + spelling(pair.right));
    return add(joined(pair), length(pair.left) + length(pair.right));
  }

  ordered_json model() const {
    ordered_json vocab = ordered_json::object();
    auto& members = vocab.get_ref<ordered_json::object_t&>();
    members.reserve(spelled_.size());
    // Placed directly: operator[] of an ordered object searches all members.
    for (size_t id = 0; id < spelled_.size(); ++id) {
      members.push_back({spelled_[id], ordered_json(id)});
    }
    return {{"type", "BPE"},
            {"dropout", nullptr},
            {"unk_token", nullptr},
            {"continuing_subword_prefix", nullptr},
            {"end_of_word_suffix", nullptr},
            {"fuse_unk", false},
            {"byte_fallback", false},
            {"ignore_merges", false},
            {"vocab", std::move(vocab)},
            {"merges", merges_}};
  }

 private:
  const std::string& spelling(int32_t id) const { return spelled_[static_cast<size_t>(id)]; }

  std::vector<std::string> spelled_;
  std::vector<uint32_t> lengths_;
  std::unordered_map<std::string, int32_t> ids_;
  std::vector<std::string> merges_;
};

void learn_merges(PairMerger& merger, Vocabulary& vocabulary, const BpeTrainingOptions& options,
                  const BpeTrainer::Progress& progress) {
  const auto& special = options.special_tokens;
  const int32_t wanted = options.vocab_size - narrow<int32_t>(special.size());
  const int64_t total = wanted - vocabulary.size();
  const int32_t first = vocabulary.size();
  while (vocabulary.size() < wanted) {
    const auto pair = merger.most_frequent(options.min_count);
    if (!pair) break;
    // A special token must never come out of ordinary text.
    const std::string joined = vocabulary.joined(*pair);
    if (std::find(special.begin(), special.end(), joined) != special.end()) continue;
    const int32_t token = vocabulary.add_merge(*pair);
    merger.merge(*pair, token, vocabulary.length(token));
    if (progress) progress(vocabulary.size() - first, total);
  }
}

std::string to_json(Vocabulary& vocabulary, const BpeTrainingOptions& options) {
  ordered_json added = ordered_json::array();
  for (const auto& token : options.special_tokens) {
    const int32_t id = vocabulary.add(token, 0);
    added.push_back({{"id", id},
                     {"content", token},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false},
                     {"special", true}});
  }
  const ordered_json file = {
      {"version", "1.0"},           {"truncation", nullptr},
      {"padding", nullptr},         {"added_tokens", added},
      {"normalizer", nullptr},      {"pre_tokenizer", pre_tokenizer_of(options.pattern)},
      {"post_processor", nullptr},  {"decoder", byte_level()},
      {"model", vocabulary.model()}};
  return file.dump(1) + "\n";
}

}  // namespace

struct BpeTrainer::Counts {
  explicit Counts(const std::string& pattern)
      : pre_tokenizer(pre_tokenizer_of(pattern)), cutter(pre_tokenizer) {}

  void add(std::string_view piece) {
    const auto found = pieces.find(piece);
    if (found != pieces.end()) {
      ++found->second;
    } else {
      pieces.emplace(piece, 1);
    }
  }

  PreTokenizer pre_tokenizer;
  PieceCutter cutter;
  StringMap<int64_t> pieces;
};

BpeTrainer::BpeTrainer(BpeTrainingOptions options) : options_(std::move(options)) {
  const auto least = static_cast<int64_t>(256 + options_.special_tokens.size());
  if (options_.vocab_size < least) {
    fail_user("a vocabulary of {} is too small: 256 bytes and {} special tokens need {}",
              options_.vocab_size, options_.special_tokens.size(), least);
  }
  for (const auto& token : options_.special_tokens) {
    if (token.empty()) fail_user("a special token is empty");
    if (!is_valid_utf8(token)) {
      fail_user("the special token '{}' is not UTF-8 text", repair_utf8(token));
    }
  }
  counts_ = std::make_unique<Counts>(options_.pattern);
}

BpeTrainer::~BpeTrainer() = default;

void BpeTrainer::add_document(std::string_view text) {
  const std::string repaired = is_valid_utf8(text) ? std::string() : repair_utf8(text);
  counts_->cutter.cut(repaired.empty() ? text : std::string_view(repaired),
                      [&](std::string_view piece) { counts_->add(piece); });
}

BpeTrainer::Result BpeTrainer::train(const Progress& progress) const {
  if (counts_->pieces.empty()) fail_user("there is no text to train a tokenizer on");
  PairMerger merger(Vocabulary::byte_ids());
  for (const auto& [piece, count] : counts_->pieces) merger.add_piece(piece, count);
  Vocabulary vocabulary;
  learn_merges(merger, vocabulary, options_, progress);
  std::string json = to_json(vocabulary, options_);
  return {std::move(json), vocabulary.size()};
}

BpeTrainer::Result train_bpe(const std::vector<std::string>& documents,
                             const BpeTrainingOptions& options,
                             const BpeTrainer::Progress& progress) {
  BpeTrainer trainer(options);
  for (const auto& document : documents) trainer.add_document(document);
  return trainer.train(progress);
}

}  // namespace longhaul::data
