// A byte-level BPE tokenizer as Hugging Face's tokenizer.json describes it: text to ids and back.
// What is not supported (other models, normalizers, pre-tokenizers) is a UserError when it is
// loaded. It adds no special tokens by itself; documents and rows are made in packed_dataset.h.
// Called by the corpora, the tokenizer command and generation.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace longhaul::data {

struct TokenizerParts;

// Immutable and cheap to copy; threads may share it.
class Tokenizer {
 public:
  // `path`: a tokenizer.json or the folder that holds one. A tokenizer_config.json beside it, if
  // any, names the tokens that end and begin a text.
  static Tokenizer load(const std::filesystem::path& path);
  // `name` stands for the file in messages.
  static Tokenizer parse(std::string_view json, const std::string& name);

  // Broken UTF-8 is read as U+FFFD (base/utf8.h).
  std::vector<int32_t> encode(std::string_view text) const;
  // Ill-formed bytes come out as U+FFFD. UserError for an id outside the vocabulary.
  std::string decode(std::span<const int32_t> ids) const;
  std::string decode_bytes(std::span<const int32_t> ids) const;

  // The highest id plus one: the rows that an embedding needs.
  int32_t vocab_size() const;
  // False for an id that stands for nothing: out of range, or a gap between ids.
  bool contains(int32_t id) const;
  // By the token's spelling in the file ("Ġthe", "<|endoftext|>").
  std::optional<int32_t> token_id(std::string_view spelling) const;
  std::optional<int32_t> eos_id() const;
  std::optional<int32_t> bos_id() const;
  bool is_special(int32_t id) const;
  // The bytes of text that a token stands for; 0 for a special one.
  int64_t text_bytes(int32_t id) const;
  // A hash of all that encode depends on, and of which token ends a text.
  uint64_t fingerprint() const;

 private:
  friend class Encoder;
  explicit Tokenizer(std::shared_ptr<const TokenizerParts> parts) : parts_(std::move(parts)) {}

  std::shared_ptr<const TokenizerParts> parts_;
};

// One thread's state for encoding much text: remembers words, keeps its buffers.
class Encoder {
 public:
  // remembered_words: a power of two, at 64 bytes each.
  explicit Encoder(const Tokenizer& tokenizer, size_t remembered_words = 1 << 15);
  ~Encoder();
  Encoder(Encoder&&) noexcept;

  // Appends the ids of `text` to `out`.
  void encode(std::string_view text, std::vector<int32_t>& out);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace longhaul::data
