#include "longhaul/config/raw_value.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <optional>

#include "longhaul/base/error.h"
#include "longhaul/base/text.h"
#include "longhaul/config/toml_reader.h"

namespace longhaul {
namespace {

struct Describe {
  std::string operator()(bool value) const { return value ? "true" : "false"; }
  std::string operator()(int64_t value) const { return fmt::format("the integer {}", value); }
  std::string operator()(double value) const {
    return fmt::format("the float {}", toml_text(Value(value)));
  }
  std::string operator()(const std::string& value) const {
    return fmt::format("the string {}", toml_text(Value(value)));
  }
  std::string operator()(const std::vector<RawValue>&) const { return "a list"; }
  std::string operator()(const RawTable&) const { return "a table"; }
  std::string operator()(const RawOther& other) const { return other.what; }
};

[[noreturn]] void fail_value(const Option& option, const Origin& origin, const std::string& what) {
  fail_user("{}: {}: {}", origin.text(), option.key, what);
}

// Thrown inside this file only: the value has another type than the option.
struct Mismatch {
  const RawValue* value;
  const char* expected;
};

// Thrown inside this file only: a table of a list has a key that there is not.
struct UnknownKey {
  std::string key;
  Strings known;
};

template <typename T>
struct Read;

template <typename T>
const T& held(const RawValue& value, const char* expected) {
  if (const T* found = std::get_if<T>(&value.data)) return *found;
  throw Mismatch{&value, expected};
}

template <>
struct Read<bool> {
  static bool from(const RawValue& value) { return held<bool>(value, "true or false"); }
};

template <>
struct Read<int64_t> {
  static int64_t from(const RawValue& value) { return held<int64_t>(value, "an integer"); }
};

template <>
struct Read<double> {
  static double from(const RawValue& value) {
    if (const auto* whole = std::get_if<int64_t>(&value.data)) return static_cast<double>(*whole);
    return held<double>(value, "a number");
  }
};

template <>
struct Read<std::string> {
  static std::string from(const RawValue& value) {
    return held<std::string>(value, "a string in quotes");
  }
};

std::string trimmed(const std::string& text) {
  const auto first = text.find_first_not_of(" \t");
  return first == std::string::npos ? ""
                                    : text.substr(first, text.find_last_not_of(" \t") - first + 1);
}

Strings split_at_commas(const std::string& text) {
  Strings parts;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string part = trimmed(text.substr(begin, end - begin));
    if (!part.empty()) parts.push_back(part);
    begin = end + 1;
  }
  return parts;
}

template <>
struct Read<Strings> {
  // TorchTitan's lists of names may also be one string with commas.
  static Strings from(const RawValue& value) {
    if (const auto* text = std::get_if<std::string>(&value.data)) return split_at_commas(*text);
    Strings list;
    for (const auto& element : held<std::vector<RawValue>>(value, "a list of strings")) {
      list.push_back(held<std::string>(element, "a list of strings"));
    }
    return list;
  }
};

template <>
struct Read<Integers> {
  static Integers from(const RawValue& value) {
    Integers list;
    for (const auto& element : held<std::vector<RawValue>>(value, "a list of integers")) {
      list.push_back(held<int64_t>(element, "a list of integers"));
    }
    return list;
  }
};

template <>
struct Read<StringLists> {
  static StringLists from(const RawValue& value) {
    StringLists lists;
    for (const auto& element : held<std::vector<RawValue>>(value, "a list of lists of strings")) {
      lists.push_back(Read<Strings>::from(element));
    }
    return lists;
  }
};

template <>
struct Read<Mix> {
  static constexpr const char* kExpected = "a list of tables with path and weight";
  static Mix from(const RawValue& value) {
    Mix mix;
    for (const auto& element : held<std::vector<RawValue>>(value, kExpected)) {
      mix.push_back(part(element));
    }
    return mix;
  }

 private:
  static MixPart part(const RawValue& value) {
    MixPart part;
    for (const auto& [key, of_key] : held<RawTable>(value, kExpected)) {
      if (key == "path") {
        part.path = Read<std::string>::from(of_key);
      } else if (key == "weight") {
        part.weight = Read<double>::from(of_key);
      } else {
        throw UnknownKey{key, {"path", "weight"}};
      }
    }
    return part;
  }
};

template <typename T>
struct Read<std::optional<T>> {
  static std::optional<T> from(const RawValue& value) { return Read<T>::from(value); }
};

Value read_as(const Value& type, const RawValue& raw) {
  return std::visit(
      [&](const auto& sample) {
        using T = std::decay_t<decltype(sample)>;
        return Value(std::in_place_type<T>, Read<T>::from(raw));
      },
      type);
}

// Why a value is outside the limits, or nothing.
struct Check {
  const Limits& limits;

  std::string operator()(bool) const { return ""; }
  std::string operator()(int64_t value) const {
    return limits.holds(static_cast<double>(value)) ? "" : out_of_range(Value(value));
  }
  std::string operator()(double value) const {
    return limits.holds(value) ? "" : out_of_range(Value(value));
  }
  std::string operator()(const std::string& value) const {
    const auto& names = limits.choices;
    if (names.empty() || std::find(names.begin(), names.end(), value) != names.end()) return "";
    return fmt::format("{} is not one of {}{}", toml_text(Value(value)), limits.text(),
                       did_you_mean(value, names));
  }
  std::string operator()(const MixPart& part) const {
    if (part.path.empty()) return "a part has no path";
    if (part.weight > 0 && std::isfinite(part.weight)) return "";
    return fmt::format("the weight of \"{}\" is {}, expected a number above 0", part.path,
                       toml_text(Value(part.weight)));
  }
  template <typename T>
  std::string operator()(const std::vector<T>& list) const {
    for (const auto& element : list) {
      if (std::string why = (*this)(element); !why.empty()) return why;
    }
    return "";
  }
  template <typename T>
  std::string operator()(const std::optional<T>& value) const {
    return value ? (*this)(*value) : "";
  }

 private:
  std::string out_of_range(const Value& value) const {
    const std::string range = limits.text();
    return fmt::format("{} is out of range, expected {}", toml_text(value),
                       range.empty() ? "a finite number" : range);
  }
};

template <typename T>
std::optional<T> whole_number(const std::string& text) {
  T value{};
  const char* begin = text.data() + (text.starts_with('+') ? 1 : 0);
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(begin, end, value);
  if (error != std::errc() || stop != end) return std::nullopt;
  return value;
}

RawValue number_word(const std::string& word) {
  std::string digits = word;
  std::erase(digits, '_');
  if (const auto whole = whole_number<int64_t>(digits)) return {*whole};
  if (const auto real = whole_number<double>(digits)) return {*real};
  return {word};
}

RawValue bool_word(const std::string& word) {
  if (word == "true" || word == "True") return {true};
  if (word == "false" || word == "False") return {false};
  return {word};
}

RawValue list_word(const Option& option, const std::string& word, bool integers) {
  if (trimmed(word).starts_with('[')) return parse_toml_value(word, "command line: " + option.key);
  std::vector<RawValue> list;
  for (const auto& part : split_at_commas(word)) {
    list.push_back(integers ? number_word(part) : RawValue{part});
  }
  return {list};
}

}  // namespace

std::string describe(const RawValue& value) { return std::visit(Describe{}, value.data); }

void assign(const Option& option, const RawValue& raw, const Origin& origin, JobConfig& config) {
  try {
    Value value = read_as(option.default_value(), raw);
    const std::string why = std::visit(Check{option.limits}, value);
    if (!why.empty()) fail_value(option, origin, why);
    option.set(config, std::move(value));
    config.origins[option.key] = origin;
  } catch (const Mismatch& mismatch) {
    fail_value(option, origin,
               fmt::format("expected {}, got {}", mismatch.expected, describe(*mismatch.value)));
  } catch (const UnknownKey& unknown) {
    const std::string hint = did_you_mean(unknown.key, unknown.known);
    fail_value(
        option, origin,
        fmt::format(
            "unknown key '{}'{}", unknown.key,
            hint.empty() ? fmt::format("; known are {}", fmt::join(unknown.known, ", ")) : hint));
  }
}

void assign_word(const Option& option, const std::string& word, JobConfig& config) {
  const Origin origin{Origin::Kind::kCommandLine, "", 0};
  const std::string type = option.type_name();
  const bool is_optional = type.ends_with(", optional");
  if (is_optional && (word == "None" || word == "none")) {
    option.set(config, option.default_value());
    config.origins[option.key] = origin;
    return;
  }
  if (type == "list of { path, weight }") {
    assign(option, parse_toml_value(word, "command line: " + option.key), origin, config);
  } else if (type.starts_with("list")) {
    assign(option, list_word(option, word, type == "list of int"), origin, config);
  } else if (type.starts_with("bool")) {
    assign(option, bool_word(word), origin, config);
  } else if (type.starts_with("str")) {
    assign(option, RawValue{word}, origin, config);
  } else {
    assign(option, number_word(word), origin, config);
  }
}

}  // namespace longhaul
