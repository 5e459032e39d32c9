#include "longhaul/data/pre_tokenizer.h"

#include <nlohmann/json.hpp>

#include "longhaul/base/error.h"
#include "longhaul/data/utf8.h"

namespace longhaul::data {
namespace {

// The cut that ByteLevel makes by itself: English contractions, letters, digits, the rest, blanks.
constexpr std::string_view kByteLevelPattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

std::string type_of(const nlohmann::json& component) {
  return component.is_object() ? component.value("type", "") : "";
}

}  // namespace

PreTokenizer::PreTokenizer(const nlohmann::json& description) {
  if (!description.is_null()) add(description);
  if (!byte_level_) {
    fail_user("pre_tokenizer: only byte-level tokenizers are supported, and ByteLevel is missing");
  }
}

void PreTokenizer::add(const nlohmann::json& component) {
  const std::string type = type_of(component);
  if (byte_level_) fail_user("pre_tokenizer: {} after ByteLevel is not supported", type);
  if (type == "Sequence") {
    for (const auto& part : component.at("pretokenizers")) add(part);
  } else if (type == "Split") {
    add_split(component);
  } else if (type == "Digits") {
    steps_.emplace_back(component.value("individual_digits", false) ? R"(\p{N})" : R"(\p{N}+)");
  } else if (type == "ByteLevel") {
    add_byte_level(component);
  } else {
    fail_user(
        "pre_tokenizer: the type '{}' is not supported (known: Sequence, Split, Digits, ByteLevel)",
        type);
  }
}

void PreTokenizer::add_split(const nlohmann::json& component) {
  const std::string behavior = component.value("behavior", "");
  if (behavior != "Isolated") {
    fail_user("pre_tokenizer: Split with the behavior '{}' is not supported (known: Isolated)",
              behavior);
  }
  const auto& pattern = component.at("pattern");
  const bool literal = pattern.contains("String");
  const std::string text = pattern.at(literal ? "String" : "Regex").get<std::string>();
  if (text.empty()) fail_user("pre_tokenizer: Split has an empty pattern");
  steps_.emplace_back(text, literal ? Regex::Kind::kLiteral : Regex::Kind::kRuby);
}

void PreTokenizer::add_byte_level(const nlohmann::json& component) {
  if (component.value("add_prefix_space", false)) {
    fail_user("pre_tokenizer: ByteLevel with add_prefix_space is not supported");
  }
  if (component.value("use_regex", true)) steps_.emplace_back(kByteLevelPattern);
  byte_level_ = true;
}

PieceCutter::PieceCutter(const PreTokenizer& pre_tokenizer) {
  for (const Regex& step : pre_tokenizer.steps()) matchers_.emplace_back(step);
}

void PieceCutter::cut_from_step(size_t step, std::string_view text, const Sink& sink) {
  if (step == matchers_.size()) {
    if (!text.empty()) sink(text);
    return;
  }
  size_t done = 0;
  for (size_t from = 0; from < text.size();) {
    const auto match = matchers_[step].find(text, from);
    if (!match) break;
    // An empty match cuts in front of a character without taking it.
    const bool empty = match->begin == match->end;
    if (match->begin > done) cut_from_step(step + 1, text.substr(done, match->begin - done), sink);
    if (!empty) {
      cut_from_step(step + 1, text.substr(match->begin, match->end - match->begin), sink);
    }
    done = match->end;
    from = match->end;
    if (empty && from < text.size()) from += code_point_at(text, from).length;
  }
  if (done < text.size()) cut_from_step(step + 1, text.substr(done), sink);
}

}  // namespace longhaul::data
