// TOML text to entries with their line. The only file of the program that includes toml++, which is
// slow to compile. Knows no options; load.cpp calls it.
#pragma once

#include <string>
#include <vector>

#include "longhaul/config/raw_value.h"

namespace longhaul {

struct TomlEntry {
  std::string key;  // full path, "training.seq_len"
  int64_t line = 0;
  RawValue value;
  bool is_table = false;  // a section; value then says "a table"
};

// Every value and every table of the text, in the order of their lines. `name` is the file's name
// for messages. Throws UserError with name and line on text that is not UTF-8 or not TOML.
std::vector<TomlEntry> parse_toml(const std::string& text, const std::string& name);

// One value, e.g. a list. `place` begins the message of the UserError.
RawValue parse_toml_value(const std::string& text, const std::string& place);

}  // namespace longhaul
