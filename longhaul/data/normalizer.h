// The normalizer of a tokenizer.json: what changes a text before it is cut. Known: NFC, NFD, NFKC,
// NFKD, Lowercase, Strip, Prepend, Replace, Sequence of them, and none; anything else is a
// UserError that names it. Called by Tokenizer.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "longhaul/data/regex.h"
#include "longhaul/data/unicode.h"

namespace longhaul::data {

// Immutable; threads may share it.
class Normalizer {
 public:
  struct Lowercase {};
  struct Strip {
    bool left, right;
  };
  struct Prepend {
    std::string text;
  };
  struct Replace {
    Regex pattern;
    std::string content;
  };
  using Step = std::variant<NormalForm, Lowercase, Strip, Prepend, Replace>;

  Normalizer() = default;
  explicit Normalizer(const nlohmann::json& description);

  const std::vector<Step>& steps() const { return steps_; }

 private:
  void add(const nlohmann::json& component, int depth);

  std::vector<Step> steps_;
};

// One thread's state for normalizing; the Normalizer must outlive it.
class TextNormalizer {
 public:
  explicit TextNormalizer(const Normalizer& normalizer);

  bool changes_nothing() const { return normalizer_->steps().empty(); }

  struct Result {
    std::string text;
    bool keeps_start;  // false if the text's beginning was taken away
  };
  // `text` must be valid UTF-8. UserError where a hostile Replace blows it up.
  Result apply(std::string_view text);

 private:
  // One step on `result`; `matcher`: the place of a Replace's.
  void run(NormalForm form, size_t matcher, size_t most, Result& result);
  void run(const Normalizer::Lowercase&, size_t matcher, size_t most, Result& result);
  void run(const Normalizer::Strip& strip, size_t matcher, size_t most, Result& result);
  void run(const Normalizer::Prepend& prepend, size_t matcher, size_t most, Result& result);
  void run(const Normalizer::Replace& replace, size_t matcher, size_t most, Result& result);

  const Normalizer* normalizer_;
  std::vector<RegexMatcher> matchers_;  // one a Replace, in their order
  std::vector<size_t> matcher_of_step_;
};

// `text` with every match replaced by `content`, no longer than `most` bytes (else UserError).
std::string replace_all(RegexMatcher& pattern, std::string_view text, std::string_view content,
                        size_t most);

}  // namespace longhaul::data
