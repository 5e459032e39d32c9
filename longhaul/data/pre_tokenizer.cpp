#include "longhaul/data/pre_tokenizer.h"

#include <nlohmann/json.hpp>

#include "longhaul/base/error.h"
#include "longhaul/data/component.h"
#include "longhaul/data/unicode_sets.h"

namespace longhaul::data {
namespace {

// The cut that ByteLevel makes by itself: English contractions, letters, digits, the rest, blanks.
constexpr std::string_view kByteLevelPattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

SplitBehavior behavior_of(const nlohmann::json& component) {
  const std::string name = text_of(component, "behavior");
  if (name == "Removed") return SplitBehavior::kRemoved;
  if (name == "Isolated") return SplitBehavior::kIsolated;
  if (name == "MergedWithPrevious") return SplitBehavior::kMergedWithPrevious;
  if (name == "MergedWithNext") return SplitBehavior::kMergedWithNext;
  if (name == "Contiguous") return SplitBehavior::kContiguous;
  fail_user("pre_tokenizer: {} with the behavior '{}' is not supported", type_of(component), name);
}

Regex set(std::string_view members, std::string_view behind = "") {
  return Regex(fmt::format("[{}]{}", members, behind), Regex::Kind::kPcre);
}

PreTokenizer::Metaspace::Prepend prepend_of(const nlohmann::json& component) {
  using Prepend = PreTokenizer::Metaspace::Prepend;
  const std::string scheme = text_of(component, "prepend_scheme");
  if (!flag(component, "add_prefix_space", true)) {  // the older way to say it
    if (!scheme.empty() && scheme != "never") {
      fail_user("Metaspace: add_prefix_space is false, but prepend_scheme is '{}'", scheme);
    }
    return Prepend::kNever;
  }
  if (scheme.empty() || scheme == "always") return Prepend::kAlways;
  if (scheme == "first") return Prepend::kFirst;
  if (scheme == "never") return Prepend::kNever;
  fail_user("Metaspace: prepend_scheme is '{}', expected always, first or never", scheme);
}

}  // namespace

PreTokenizer::PreTokenizer(const nlohmann::json& description) {
  if (!description.is_null()) add(description, 0);
  is_byte_level_ = !steps_.empty() && std::holds_alternative<SpellBytes>(steps_.back());
  if (is_byte_level_) steps_.pop_back();
}

void PreTokenizer::add(const nlohmann::json& component, int depth) {
  check_steps(steps_.size(), "pre_tokenizer");
  const std::string type = type_of(component);
  if (type == "Sequence") {
    for (const auto& part : parts_of(component, "pretokenizers", depth)) add(part, depth + 1);
  } else if (type == "Split") {
    add_split(component);
  } else if (type == "Digits") {
    const bool single = flag(component, "individual_digits");
    steps_.emplace_back(Cut{set(digit_members(), single ? "" : "+")});
  } else if (type == "Punctuation") {
    const bool is_set = !field(component, "behavior").is_null();
    steps_.emplace_back(Cut{set(punctuation_members()),
                            is_set ? behavior_of(component) : SplitBehavior::kIsolated});
  } else if (type == "Whitespace") {
    const std::string words = word_members();
    const auto pattern = fmt::format("[{0}]+|[^{0}{1}]+", words, space_members());
    steps_.emplace_back(Cut{Regex(pattern, Regex::Kind::kPcre), SplitBehavior::kRemoved, true});
  } else if (type == "WhitespaceSplit") {
    steps_.emplace_back(Cut{set(space_members()), SplitBehavior::kRemoved});
  } else if (type == "ByteLevel") {
    add_byte_level(component);
  } else if (type == "Metaspace") {
    add_metaspace(component);
  } else {
    fail_user(
        "pre_tokenizer: the type '{}' is not supported (known: Sequence, Split, Digits, "
        "Punctuation, Whitespace, WhitespaceSplit, ByteLevel, Metaspace)",
        type);
  }
}

void PreTokenizer::add_split(const nlohmann::json& component) {
  steps_.emplace_back(
      Cut{pattern_of(component), behavior_of(component), flag(component, "invert")});
}

void PreTokenizer::add_byte_level(const nlohmann::json& component) {
  if (flag(component, "add_prefix_space")) steps_.emplace_back(PrefixBlank{});
  if (flag(component, "use_regex", true)) steps_.emplace_back(Cut{Regex(kByteLevelPattern)});
  steps_.emplace_back(SpellBytes{});
}

void PreTokenizer::add_metaspace(const nlohmann::json& component) {
  const std::string replacement = required_character(component, "replacement");
  steps_.emplace_back(Metaspace{replacement, prepend_of(component)});
  if (flag(component, "split", true)) {
    steps_.emplace_back(
        Cut{Regex(replacement, Regex::Kind::kLiteral), SplitBehavior::kMergedWithNext});
  }
}

}  // namespace longhaul::data
