// What cuts a text into the pieces that byte pair encoding then works on: the pre_tokenizer of a
// tokenizer.json. Known: Split, Digits, Punctuation, Whitespace, WhitespaceSplit, ByteLevel,
// Metaspace, Sequence of them, and none; anything else is a UserError that names it. It knows no
// vocabulary; piece_cutter.h runs it. Called by Tokenizer and the trainer.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "longhaul/data/regex.h"

namespace longhaul::data {

// What becomes of a pattern's matches.
enum class SplitBehavior { kRemoved, kIsolated, kMergedWithPrevious, kMergedWithNext, kContiguous };

// Immutable; threads may share it.
class PreTokenizer {
 public:
  struct Cut {
    Regex pattern;
    SplitBehavior behavior = SplitBehavior::kIsolated;
    bool invert = false;  // what lies between the matches is what counts as matching
  };
  // A blank in front of a piece that does not begin with one.
  struct PrefixBlank {};
  // Every byte becomes a character of the byte alphabet.
  struct SpellBytes {};
  // Blanks become `replacement`, which may also go in front of a piece.
  struct Metaspace {
    enum class Prepend { kNever, kFirst, kAlways };
    std::string replacement;
    Prepend prepend;
  };
  using Step = std::variant<Cut, PrefixBlank, SpellBytes, Metaspace>;

  explicit PreTokenizer(const nlohmann::json& description);

  // Without a SpellBytes at the very end, where is_byte_level() stands for it.
  const std::vector<Step>& steps() const { return steps_; }
  // The pieces are bytes, for a vocabulary in the byte alphabet; otherwise characters.
  bool is_byte_level() const { return is_byte_level_; }

 private:
  void add(const nlohmann::json& component, int depth);
  void add_split(const nlohmann::json& component);
  void add_byte_level(const nlohmann::json& component);
  void add_metaspace(const nlohmann::json& component);

  std::vector<Step> steps_;
  bool is_byte_level_ = false;
};

}  // namespace longhaul::data
