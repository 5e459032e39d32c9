#include "longhaul/config/option.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "longhaul/config/option_builder.h"

namespace longhaul {
namespace {

std::vector<Option> make_options() {
  std::vector<Option> table;
  add_run_options(table);
  add_model_options(table);
  add_training_options(table);
  add_parallel_options(table);
  return table;
}

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (c == '\n') {
      out += "\\n";
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      out += fmt::format("\\u{:04X}", static_cast<unsigned>(c));
    } else {
      out += c;
    }
  }
  return out + '"';
}

std::string text_of(bool value) { return value ? "true" : "false"; }
std::string text_of(int64_t value) { return std::to_string(value); }
std::string text_of(const std::string& value) { return quoted(value); }

// The shortest text that reads back to the same double and that TOML takes for a float.
std::string text_of(double value) {
  const std::string text = fmt::format("{}", value);
  return text.find_first_of(".en") == std::string::npos ? text + ".0" : text;
}

std::string text_of(const MixPart& part) {
  return fmt::format("{{ path = {}, weight = {} }}", text_of(part.path), text_of(part.weight));
}

template <typename T>
std::string text_of(const std::vector<T>& list) {
  std::vector<std::string> parts;
  for (const auto& element : list) parts.push_back(text_of(element));
  return fmt::format("[{}]", fmt::join(parts, ", "));
}

template <typename T>
std::string text_of(const std::optional<T>& value) {
  return value ? text_of(*value) : "";
}

struct TypeName {
  std::string operator()(bool) const { return "bool"; }
  std::string operator()(int64_t) const { return "int"; }
  std::string operator()(double) const { return "float"; }
  std::string operator()(const std::string&) const { return "str"; }
  std::string operator()(const Strings&) const { return "list of str"; }
  std::string operator()(const Integers&) const { return "list of int"; }
  std::string operator()(const Mix&) const { return "list of { path, weight }"; }
  std::string operator()(const StringLists&) const { return "list of lists of str"; }
  template <typename T>
  std::string operator()(const std::optional<T>&) const {
    return (*this)(T{}) + ", optional";
  }
};

}  // namespace

bool Limits::holds(double number) const {
  if (std::isnan(number)) return false;
  if (std::isinf(number)) return infinite && number > 0;
  if (minus_one && number == -1) return true;
  return (exclude_min ? number > min : number >= min) &&
         (exclude_max ? number < max : number <= max);
}

std::string Limits::text() const {
  if (!choices.empty()) return fmt::format("{}", fmt::join(choices, ", "));
  std::string range;
  if (std::isfinite(max)) {
    range = fmt::format("{} to {}{}", min, exclude_max ? "below " : "", max);
  } else if (std::isfinite(min)) {
    range = fmt::format("{} {}", exclude_min ? ">" : ">=", min);
  }
  if (minus_one) range = "-1 or " + range;
  if (infinite) range += " or inf";
  return range;
}

std::string Option::type_name() const { return std::visit(TypeName{}, default_value()); }

bool Option::is_bool() const { return std::holds_alternative<bool>(default_value()); }

const std::vector<Option>& options() {
  static const std::vector<Option> table = make_options();
  return table;
}

const Option* find_option(const std::string& key) {
  const auto& all = options();
  const auto found = std::find_if(all.begin(), all.end(), [&](const Option& option) {
    return option.key == key || (!option.alias.empty() && option.alias == key);
  });
  return found == all.end() ? nullptr : &*found;
}

Strings section_names() {
  Strings names;
  for (const auto& option : options()) {
    if (std::find(names.begin(), names.end(), option.section) == names.end()) {
      names.push_back(option.section);
    }
  }
  return names;
}

std::string toml_text(const Value& value) {
  return std::visit([](const auto& held) { return text_of(held); }, value);
}

std::string to_string(Provenance provenance) {
  switch (provenance) {
    case Provenance::kTorchTitan:
      return "TorchTitan";
    case Provenance::kRecipe:
      return "recipe";
    case Provenance::kLonghaul:
      return "longhaul";
  }
  return "";
}

bool same_values(const JobConfig& a, const JobConfig& b) {
  const auto& all = options();
  return std::all_of(all.begin(), all.end(),
                     [&](const Option& option) { return option.get(a) == option.get(b); });
}

}  // namespace longhaul
