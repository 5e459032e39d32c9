#include "longhaul/data/decoder.h"

#include <cctype>
#include <nlohmann/json.hpp>
#include <optional>

#include "longhaul/base/error.h"
#include "longhaul/base/utf8.h"
#include "longhaul/data/byte_alphabet.h"
#include "longhaul/data/component.h"
#include "longhaul/data/growth_limit.h"
#include "longhaul/data/normalizer.h"
#include "longhaul/data/utf8.h"

namespace longhaul::data {
namespace {

using Tokens = std::vector<std::string>;

std::string join(const Tokens& tokens, std::string_view between) {
  std::string text;
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (i > 0) text += between;
    text += tokens[i];
  }
  return text;
}

size_t size_of(const Tokens& tokens) {
  size_t bytes = 0;
  for (const auto& token : tokens) bytes += token.size();
  return bytes;
}

// The byte that a token such as "<0xE4>" is.
std::optional<char> fallback_byte(std::string_view token) {
  if (token.size() != 6 || !token.starts_with("<0x") || !token.ends_with(">")) return std::nullopt;
  int value = 0;
  for (const char c : token.substr(token[3] == '+' ? 4 : 3, token[3] == '+' ? 1 : 2)) {
    const auto digit =
        std::string_view("0123456789abcdef").find(static_cast<char>(std::tolower(c)));
    if (digit == std::string_view::npos) return std::nullopt;
    value = value * 16 + static_cast<int>(digit);
  }
  return static_cast<char>(value);
}

// A row of bytes is one text if it is well-formed as a whole, else one U+FFFD a byte.
void add_row(Tokens& out, std::string& row) {
  if (row.empty()) return;
  if (is_valid_utf8(row)) {
    out.push_back(row);
  } else {
    out.insert(out.end(), row.size(), "\uFFFD");
  }
  row.clear();
}

Tokens run(const Decoder::ByteLevel&, Tokens tokens, size_t) {
  std::string bytes;
  for (const auto& token : tokens) bytes += from_byte_alphabet(token).value_or(token);
  return {is_valid_utf8(bytes) ? bytes : repair_utf8(bytes)};
}

Tokens run(const Decoder::ByteFallback&, Tokens tokens, size_t) {
  Tokens out;
  std::string row;
  for (auto& token : tokens) {
    if (const auto byte = fallback_byte(token)) {
      row += *byte;
    } else {
      add_row(out, row);
      out.push_back(std::move(token));
    }
  }
  add_row(out, row);
  return out;
}

Tokens run(const Decoder::Fuse&, Tokens tokens, size_t) { return {join(tokens, "")}; }

Tokens run(const Decoder::Replace& replace, Tokens tokens, size_t most) {
  RegexMatcher matcher(replace.pattern);
  for (auto& token : tokens) token = replace_all(matcher, token, replace.content, most);
  return tokens;
}

Tokens run(const Decoder::Strip& strip, Tokens tokens, size_t) {
  for (auto& token : tokens) {
    std::string_view rest = token;
    size_t begin = 0;
    for (size_t i = 0; i < strip.start && rest.substr(begin).starts_with(strip.character); ++i) {
      begin += strip.character.size();
    }
    // Both ends are looked at on their own, so that they may meet.
    size_t end = token.size();
    for (size_t i = 0; i < strip.stop && rest.substr(0, end).ends_with(strip.character); ++i) {
      end -= strip.character.size();
    }
    token = begin < end ? token.substr(begin, end - begin) : "";
  }
  return tokens;
}

Tokens run(const Decoder::Metaspace& metaspace, Tokens tokens, size_t) {
  for (size_t i = 0; i < tokens.size(); ++i) {
    const std::string_view blank = i == 0 && metaspace.drops_first ? "" : " ";
    std::string out;
    for (size_t at = 0; at < tokens[i].size();) {
      const size_t length = code_point_at(tokens[i], at).length;
      const auto character = std::string_view(tokens[i]).substr(at, length);
      out += character == metaspace.replacement ? blank : character;
      at += length;
    }
    tokens[i] = std::move(out);
  }
  return tokens;
}

size_t count_of(const nlohmann::json& component, const char* key) {
  const auto& value = field(component, key);
  if (!value.is_number_unsigned()) {
    fail_user("{}: '{}' is {}, expected a number from 0", type_of(component), key, value.dump());
  }
  return value.get<size_t>();
}

}  // namespace

Decoder::Decoder(const nlohmann::json& description) {
  if (description.is_null()) return;
  joins_with_blanks_ = false;
  add(description, 0);
}

void Decoder::add(const nlohmann::json& component, int depth) {
  check_steps(steps_.size(), "decoder");
  const std::string type = type_of(component);
  if (type == "Sequence") {
    for (const auto& part : parts_of(component, "decoders", depth)) add(part, depth + 1);
  } else if (type == "ByteLevel") {
    steps_.emplace_back(ByteLevel{});
  } else if (type == "ByteFallback") {
    steps_.emplace_back(ByteFallback{});
  } else if (type == "Fuse") {
    steps_.emplace_back(Fuse{});
  } else if (type == "Replace") {
    steps_.emplace_back(Replace{pattern_of(component), required_text(component, "content")});
  } else if (type == "Strip") {
    steps_.emplace_back(Strip{required_character(component, "content"),
                              count_of(component, "start"), count_of(component, "stop")});
  } else if (type == "Metaspace") {
    add_metaspace(component);
  } else {
    fail_user(
        "decoder: the type '{}' is not supported (known: Sequence, ByteLevel, Replace, "
        "ByteFallback, Fuse, Strip, Metaspace)",
        type);
  }
}

void Decoder::add_metaspace(const nlohmann::json& component) {
  const bool never =
      text_of(component, "prepend_scheme") == "never" || !flag(component, "add_prefix_space", true);
  steps_.emplace_back(Metaspace{required_character(component, "replacement"), !never});
}

bool Decoder::is_byte_level() const {
  return steps_.size() == 1 && std::holds_alternative<ByteLevel>(steps_[0]);
}

std::string Decoder::decode(std::vector<std::string> tokens) const {
  if (joins_with_blanks_) return join(tokens, " ");
  const size_t most = most_bytes_from(size_of(tokens));
  for (const auto& step : steps_) {
    tokens = std::visit([&](const auto& how) { return run(how, std::move(tokens), most); }, step);
    if (size_of(tokens) > most) fail_user("decoder: it makes more than {} bytes of tokens", most);
  }
  return join(tokens, "");
}

}  // namespace longhaul::data
