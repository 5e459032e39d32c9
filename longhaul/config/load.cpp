#include "longhaul/config/load.h"

#include <algorithm>

#include "longhaul/base/error.h"
#include "longhaul/base/file.h"
#include "longhaul/base/text.h"
#include "longhaul/config/option.h"
#include "longhaul/config/raw_value.h"
#include "longhaul/config/toml_reader.h"
#include "longhaul/config/validate.h"

namespace longhaul {
namespace {

std::string read_job_file(const std::string& path) {
  std::error_code ignored;
  const auto status = fs::status(path, ignored);
  if (!fs::exists(status)) {
    fail_user("{}: there is no such job file; docs/config.md says what one holds", path);
  }
  if (fs::is_directory(status)) {
    fail_user("{}: is a folder; give the job file (*.toml) inside it", path);
  }
  return read_file(path);
}

bool is_section(const std::string& name) {
  const auto names = section_names();
  return std::any_of(names.begin(), names.end(), [&](const std::string& section) {
    return section == name || section.starts_with(name + ".");
  });
}

[[noreturn]] void fail_unknown_section(const TomlEntry& entry, const std::string& place) {
  fail_user("{}: [{}]: unknown section{}", place, entry.key,
            did_you_mean(entry.key, section_names()));
}

void read_entry(const TomlEntry& entry, const std::string& name, JobConfig& config) {
  const Origin origin{Origin::Kind::kFile, name, entry.line};
  const Option* option = find_option(entry.key);
  if (!option) {
    if (entry.is_table && !is_section(entry.key)) fail_unknown_section(entry, origin.text());
    if (entry.is_table) return;
    if (is_section(entry.key)) {
      fail_user("{}: {}: expected a section, got {}", origin.text(), entry.key,
                describe(entry.value));
    }
    fail_user("{}: {}: unknown key{}", origin.text(), entry.key, key_hint(entry.key));
  }
  if (const auto given = config.origins.find(option->key); given != config.origins.end()) {
    fail_user("{}: {} is the same as {}, which {} already gives; remove one", origin.text(),
              entry.key, entry.key == option->key ? option->alias : option->key,
              given->second.text());
  }
  assign(*option, entry.value, origin, config);
}

// Keys below an unknown section would only repeat the error, and TOML's order of lines puts the
// section first, so the first error is the one that helps.
JobConfig config_from(const std::string& text, const std::string& name) {
  JobConfig config;
  for (const auto& entry : parse_toml(text, name)) read_entry(entry, name, config);
  return config;
}

void apply(const JobWords& words, JobConfig& config) {
  for (const auto& [key, value] : words.overrides) assign_word(*find_option(key), value, config);
}

JobWords overrides_only(const Strings& words) {
  JobWords result = split_words(words);
  if (!result.plain.empty()) {
    fail_user("command line: what is '{}'? Settings are written --section.key value",
              result.plain[0]);
  }
  return result;
}

JobConfig finished(JobConfig config, const JobWords& words) {
  apply(words, config);
  settle(config);
  validate(config);
  return config;
}

JobConfig load_from(const std::string& file, const JobWords& words) {
  return finished(file.empty() ? JobConfig{} : config_from(read_job_file(file), file), words);
}

std::string job_file(const std::string& path, const JobWords& words) {
  std::string file = path;
  for (const auto& [key, value] : words.overrides) {
    if (key != "job.config_file") continue;
    if (!path.empty() && value != path) {
      fail_user("command line: two job files, {} and {}; give one", path, value);
    }
    file = value;
  }
  return file;
}

// The full key among `keys` that a user most likely meant: the section's own names first, then the
// same name in another section, then a similar name anywhere. Empty if none is near.
std::string nearest_key(const std::string& section, const std::string& name) {
  Strings own, names, namesakes, keys;
  for (const auto& option : options()) {
    if (option.section == section) own.push_back(option.name);
    if (option.name == name) namesakes.push_back(option.key);
    names.push_back(option.name);
    keys.push_back(option.key);
  }
  const std::string near = nearest_name(name, own);
  if (!near.empty()) return section + "." + near;
  if (!namesakes.empty()) {
    const std::string same = nearest_name(section + "." + name, namesakes);
    return same.empty() ? namesakes[0] : same;
  }
  const auto at = std::find(names.begin(), names.end(), nearest_name(name, names));
  return at == names.end() ? "" : keys[static_cast<size_t>(at - names.begin())];
}

}  // namespace

std::string key_hint(const std::string& key) {
  const size_t dot = key.rfind('.');
  const std::string section = dot == std::string::npos ? "" : key.substr(0, dot);
  const std::string near = nearest_key(section, key.substr(dot + 1));
  return near.empty() ? "; `longhaul config keys` lists them all"
                      : fmt::format(", did you mean '{}'?", near);
}

JobConfig parse_job(const std::string& text, const std::string& name, const Strings& overrides) {
  return finished(config_from(text, name), overrides_only(overrides));
}

JobConfig load_job(const std::string& path, const Strings& overrides) {
  const JobWords words = overrides_only(overrides);
  return load_from(job_file(path, words), words);
}

CommandLineJob load_command_line(const Strings& command_line) {
  const JobWords words = split_words(command_line);
  if (words.plain.size() > 1) {
    fail_user(
        "command line: what is '{}'? The job file is {}; settings are written --section.key value",
        words.plain[1], words.plain[0]);
  }
  const std::string file = job_file(words.plain.empty() ? "" : words.plain[0], words);
  return {load_from(file, words), file};
}

}  // namespace longhaul
