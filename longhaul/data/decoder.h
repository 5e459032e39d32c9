// The decoder of a tokenizer.json: tokens as the vocabulary spells them to text. Known: ByteLevel,
// Replace, ByteFallback, Fuse, Strip, Metaspace, Sequence of them, and none; anything else is a
// UserError that names it. Called by Tokenizer.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <variant>
#include <vector>

#include "longhaul/data/regex.h"

namespace longhaul::data {

// Immutable; threads may share it.
class Decoder {
 public:
  struct ByteLevel {};
  struct ByteFallback {};
  struct Fuse {};
  struct Replace {
    Regex pattern;
    std::string content;
  };
  // Up to so many of one character at the beginning and the end of each token.
  struct Strip {
    std::string character;
    size_t start, stop;
  };
  struct Metaspace {
    std::string replacement;
    bool drops_first;  // those of the first token stand for nothing
  };
  using Step = std::variant<ByteLevel, ByteFallback, Fuse, Replace, Strip, Metaspace>;

  Decoder() = default;
  explicit Decoder(const nlohmann::json& description);

  // True if the tokens' bytes, one after the other, are all there is to it.
  bool is_byte_level() const;

  // The text of tokens that are valid UTF-8. Ill-formed bytes come out as U+FFFD.
  std::string decode(std::vector<std::string> tokens) const;

 private:
  void add(const nlohmann::json& component, int depth);
  void add_metaspace(const nlohmann::json& component);

  bool joins_with_blanks_ = true;  // no decoder at all
  std::vector<Step> steps_;
};

}  // namespace longhaul::data
