#include "longhaul/config/write.h"

#include <algorithm>
#include <iterator>
#include <vector>

#include "longhaul/base/error.h"
#include "longhaul/config/option.h"

namespace longhaul {
namespace {

struct Row {
  std::string key, value, origin;
};

std::vector<Row> rows_of(const JobConfig& config, bool changed) {
  std::vector<Row> rows;
  for (const auto& option : options()) {
    const Value value = option.get(config);
    if (changed && value == option.default_value()) continue;
    const std::string text = toml_text(value);
    rows.push_back(
        {option.key, text.empty() ? "(not set)" : text, config.origin_of(option.key).text()});
  }
  return rows;
}

// Longer values stand over the column instead of pushing it out for all lines.
constexpr size_t kValueWidth = 28;

std::string default_text(const Option& option) {
  const std::string text = toml_text(option.default_value());
  return text.empty() ? "not set" : text;
}

// A table cell: bars would end it.
std::string cell(const std::string& text) {
  std::string out;
  for (const char c : text) out += c == '|' ? std::string("\\|") : std::string(1, c);
  return out;
}

std::string default_cell(const Option& option) {
  const std::string text = toml_text(option.default_value());
  return text.empty() ? "not set" : fmt::format("`{}`", cell(text));
}

const char* const kIntroduction =
    R"(# Job file keys

A job file is TOML in TorchTitan 0.2.1's schema; its files load unchanged. The column *origin* says
where a key comes from: TorchTitan, the DeepSeek-V3.2 recipe for Ascend, or longhaul. On the command
line every key is `--section.key value`; booleans also take `--section.key` and `--section.no_key`,
lists are TOML text or separated by commas, and `None` clears an optional key.

A key that asks for something this version does not have is refused when it would take effect;
`longhaul config check job.toml` lists such keys. `longhaul config show job.toml` prints every value
with its origin.

This page is the output of `longhaul config keys --markdown`.
)";

}  // namespace

std::string to_toml(const JobConfig& config) {
  std::string out, section;
  for (const auto& option : options()) {
    const std::string text = toml_text(option.get(config));
    if (text.empty()) continue;
    if (option.section != section) {
      section = option.section;
      out += fmt::format("{}[{}]\n", out.empty() ? "" : "\n", section);
    }
    out += fmt::format("{} = {}\n", option.name, text);
  }
  return out;
}

std::string settings_of_all_ranks(const JobConfig& config) {
  std::string out;
  for (const auto& option : options()) {
    const bool is_place = option.name.ends_with("path") || option.name.ends_with("folder");
    if (!is_place) out += fmt::format("{} = {}\n", option.key, toml_text(option.get(config)));
  }
  return out;
}

std::string show_values(const JobConfig& config, bool changed) {
  const auto rows = rows_of(config, changed);
  size_t key_width = 0;
  for (const auto& row : rows) key_width = std::max(key_width, row.key.size());
  std::string out;
  for (const auto& row : rows) {
    fmt::format_to(std::back_inserter(out), "{:<{}} = {:<{}}  # {}\n", row.key, key_width,
                   row.value, kValueWidth, row.origin);
  }
  return out;
}

std::string keys_text(const std::string& prefix) {
  std::string out;
  for (const auto& option : options()) {
    if (!option.key.starts_with(prefix)) continue;
    const std::string limits = option.limits.text();
    fmt::format_to(std::back_inserter(out), "{}  ({}, default {}{})\n    {}{}\n", option.key,
                   option.type_name(), default_text(option), limits.empty() ? "" : "; " + limits,
                   option.help, option.alias.empty() ? "" : " Also " + option.alias + ".");
  }
  return out;
}

std::string keys_markdown() {
  std::string out = kIntroduction;
  std::string section;
  for (const auto& option : options()) {
    if (option.section != section) {
      section = option.section;
      fmt::format_to(std::back_inserter(out),
                     "\n## [{}]\n\n| key | type | default | range | meaning | origin |\n"
                     "| --- | --- | --- | --- | --- | --- |\n",
                     section);
    }
    const std::string also = option.alias.empty() ? "" : fmt::format(" Also `{}`.", option.alias);
    fmt::format_to(std::back_inserter(out), "| `{}` | {} | {} | {} | {}{} | {} |\n", option.name,
                   option.type_name(), default_cell(option), cell(option.limits.text()),
                   cell(option.help), also, to_string(option.provenance));
  }
  return out;
}

}  // namespace longhaul
