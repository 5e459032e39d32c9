#include "longhaul/config/toml_reader.h"

#include <algorithm>
#include <sstream>

namespace {

// toml++ asserts on some broken headers, "[#]" for one, instead of reporting them. As an exception
// the assertion becomes a message like any other.
struct ParserAssertion {};
[[noreturn]] void fail_parser_assertion() { throw ParserAssertion(); }

}  // namespace

#undef NDEBUG  // toml++ would drop the assertions and read on
#define TOML_ASSERT(condition) ((condition) ? static_cast<void>(0) : fail_parser_assertion())
#define TOML_EXCEPTIONS 1
#define TOML_ENABLE_FORMATTERS 0
#include <toml++/toml.h>

#include "longhaul/base/error.h"
#include "longhaul/base/utf8.h"

namespace longhaul {
namespace {

RawTable to_raw_table(const toml::table& table);

RawValue to_raw(const toml::node& node) {
  if (const auto* value = node.as_boolean()) return {value->get()};
  if (const auto* value = node.as_integer()) return {value->get()};
  if (const auto* value = node.as_floating_point()) return {value->get()};
  if (const auto* value = node.as_string()) return {value->get()};
  if (const auto* array = node.as_array()) {
    std::vector<RawValue> list;
    for (const auto& element : *array) {
      const auto* table = element.as_table();
      list.push_back(table ? RawValue{to_raw_table(*table)} : to_raw(element));
    }
    return {list};
  }
  if (node.is_table()) return {RawOther{"a table"}};
  return {RawOther{"a date or time"}};
}

RawTable to_raw_table(const toml::table& table) {
  RawTable entries;
  for (const auto& [key, node] : table) entries.push_back({std::string(key.str()), to_raw(node)});
  return entries;
}

void collect(const toml::table& table, const std::string& prefix, std::vector<TomlEntry>& out) {
  for (const auto& [key, node] : table) {
    TomlEntry entry;
    entry.key = prefix + std::string(key.str());
    entry.line = node.source().begin.line;
    entry.value = to_raw(node);
    entry.is_table = node.is_table();
    out.push_back(entry);
    if (const auto* inner = node.as_table()) collect(*inner, entry.key + ".", out);
  }
}

void check_utf8(const std::string& text, const std::string& name) {
  const size_t at = first_invalid_utf8(text);
  if (at == std::string::npos) return;
  const auto line = 1 + std::count(text.begin(), text.begin() + static_cast<long>(at), '\n');
  fail_user("{}:{}: the file is not UTF-8 text (byte 0x{:02x}); save it as UTF-8", name, line,
            static_cast<unsigned char>(text[at]));
}

// toml++ puts the reason after what it was doing: "Error while parsing x: reason". One line of it.
std::string reason(const toml::parse_error& error) {
  std::string text(error.description());
  std::replace(text.begin(), text.end(), '\n', ' ');
  const std::string twice = "cannot redefine existing ";
  if (const size_t at = text.find(twice); at != std::string::npos) {
    return fmt::format("the {} is given twice; remove one", text.substr(at + twice.size()));
  }
  const std::string lead = "Error while parsing ";
  return "broken TOML: " + (text.starts_with(lead) ? text.substr(lead.size()) : text);
}

// The first line at which the parser gives up on the text's beginning.
int64_t line_of_assertion(const std::string& text) {
  int64_t line = 1;
  for (size_t end = text.find('\n'); end != std::string::npos; end = text.find('\n', end + 1)) {
    try {
      static_cast<void>(toml::parse(std::string_view(text).substr(0, end + 1)));
    } catch (const ParserAssertion&) {
      return line;
    } catch (const toml::parse_error&) {
    }
    ++line;
  }
  return line;
}

}  // namespace

std::vector<TomlEntry> parse_toml(const std::string& text, const std::string& name) {
  check_utf8(text, name);
  std::vector<TomlEntry> entries;
  try {
    collect(toml::parse(text, name), "", entries);
  } catch (const toml::parse_error& error) {
    fail_user("{}:{}: {}", name, error.source().begin.line, reason(error));
  } catch (const ParserAssertion&) {
    fail_user("{}:{}: broken TOML: not a key", name, line_of_assertion(text));
  }
  std::stable_sort(entries.begin(), entries.end(),
                   [](const auto& a, const auto& b) { return a.line < b.line; });
  return entries;
}

RawValue parse_toml_value(const std::string& text, const std::string& place) {
  try {
    const toml::table table = toml::parse("value = " + text);
    return to_raw(*table.get("value"));
  } catch (const toml::parse_error& error) {
    fail_user("{}: {}: {}", place, text, reason(error));
  } catch (const ParserAssertion&) {
    fail_user("{}: {}: broken TOML", place, text);
  }
}

}  // namespace longhaul
