// Cuts a text into the pieces that byte pair encoding then works on: the pre_tokenizer of a
// tokenizer.json. Known: Split (Isolated), Digits, ByteLevel, and Sequence of them, with ByteLevel
// last; anything else is a UserError that names it. It knows no vocabulary. Called by Tokenizer.
#pragma once

#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "longhaul/data/regex.h"

namespace longhaul::data {

class PreTokenizer {
 public:
  explicit PreTokenizer(const nlohmann::json& description);

  const std::vector<Regex>& steps() const { return steps_; }

 private:
  void add(const nlohmann::json& component);
  void add_split(const nlohmann::json& component);
  void add_byte_level(const nlohmann::json& component);

  std::vector<Regex> steps_;
  bool byte_level_ = false;
};

// One thread's state for cutting; the PreTokenizer must outlive it.
class PieceCutter {
 public:
  using Sink = std::function<void(std::string_view)>;

  explicit PieceCutter(const PreTokenizer& pre_tokenizer);

  // Hands the pieces of `text` (valid UTF-8) to `sink` in order; together they are the text.
  void cut(std::string_view text, const Sink& sink) { cut_from_step(0, text, sink); }

 private:
  void cut_from_step(size_t step, std::string_view text, const Sink& sink);

  std::vector<RegexMatcher> matchers_;
};

}  // namespace longhaul::data
