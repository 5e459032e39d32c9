// Reading the components of a tokenizer.json: fields with a type, and the first word of errors.
// Internal to the tokenizer.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "longhaul/base/error.h"
#include "longhaul/data/regex.h"
#include "longhaul/data/utf8.h"

namespace longhaul::data {

// How deep components may stand in each other; published files need two.
constexpr int kMostNested = 16;
// How many there may be in all; published files have four.
constexpr size_t kMostSteps = 64;

inline void check_steps(size_t count, const char* part) {
  if (count > kMostSteps) fail_user("{}: more than {} components", part, kMostSteps);
}

inline const nlohmann::json& field(const nlohmann::json& object, const char* key) {
  static const nlohmann::json null;
  if (!object.is_object()) return null;
  const auto found = object.find(key);
  return found == object.end() ? null : *found;
}

inline std::string type_of(const nlohmann::json& component) {
  const auto& type = field(component, "type");
  return type.is_string() ? type.get<std::string>() : "";
}

// A flag that may be missing or null.
inline bool flag(const nlohmann::json& object, const char* key, bool otherwise = false) {
  const auto& value = field(object, key);
  if (value.is_null()) return otherwise;
  if (!value.is_boolean()) fail_user("'{}' is {}, expected true or false", key, value.dump());
  return value.get<bool>();
}

// A string that may be missing or null, and then is empty.
inline std::string text_of(const nlohmann::json& object, const char* key) {
  const auto& value = field(object, key);
  if (value.is_null()) return "";
  if (!value.is_string()) fail_user("'{}' is {}, expected a string", key, value.dump());
  return value.get<std::string>();
}

inline std::string required_text(const nlohmann::json& object, const char* key) {
  if (field(object, key).is_null()) fail_user("{}: '{}' is missing", type_of(object), key);
  return text_of(object, key);
}

// A string of exactly one character.
inline std::string required_character(const nlohmann::json& object, const char* key) {
  const std::string text = required_text(object, key);
  if (text.empty() || code_point_at(text, 0).length != text.size()) {
    fail_user("{}: '{}' is '{}', expected one character", type_of(object), key, text);
  }
  return text;
}

// The parts of a Sequence, under `key`.
inline const nlohmann::json& parts_of(const nlohmann::json& sequence, const char* key, int depth) {
  const auto& parts = field(sequence, key);
  if (!parts.is_array()) fail_user("Sequence: '{}' must be an array", key);
  if (depth >= kMostNested) fail_user("Sequence: nested more than {} deep", kMostNested);
  return parts;
}

// {"String": ...} or {"Regex": ...}.
inline Regex pattern_of(const nlohmann::json& component) {
  const auto& pattern = field(component, "pattern");
  for (const char* kind : {"String", "Regex"}) {
    if (!field(pattern, kind).is_string()) continue;
    const bool literal = std::string_view(kind) == "String";
    return Regex(pattern.at(kind).get<std::string>(),
                 literal ? Regex::Kind::kLiteral : Regex::Kind::kRuby);
  }
  fail_user("{}: 'pattern' must be {{\"String\": ...}} or {{\"Regex\": ...}}", type_of(component));
}

}  // namespace longhaul::data
