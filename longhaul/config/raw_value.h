// A value as it was written, before an option's type is known: what the TOML reader and the command
// line hand to assign(). The only part of config/ that sees a user's wrong types.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "longhaul/config/option.h"

namespace longhaul {

// Something no option takes: a date, a table that is no list's. Its text names it: "a table".
struct RawOther {
  std::string what;
};

struct RawEntry;

// A table inside a list: one of [[training.mix]].
using RawTable = std::vector<RawEntry>;

struct RawValue {
  std::variant<bool, int64_t, double, std::string, std::vector<RawValue>, RawTable, RawOther> data;
};

struct RawEntry {
  std::string key;
  RawValue value;
};

// 'the string "100"', 'the integer 3', 'a list', ...
std::string describe(const RawValue& value);

// Writes `value` into the option's member and notes `origin`. Throws UserError (place, key, what
// was expected, what was given) on a wrong type, a value out of range or one that is no choice.
void assign(const Option& option, const RawValue& value, const Origin& origin, JobConfig& config);

// A word of the command line for this option: numbers and booleans are read as such, lists as TOML
// text or separated by commas, and "None" clears an optional. Throws UserError on a broken list.
void assign_word(const Option& option, const std::string& word, JobConfig& config);

}  // namespace longhaul
