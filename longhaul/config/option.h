// One option of the job file: its key, type, limits and help, and how to read and write its value
// in a JobConfig. The options are data (option_table.cpp); parsing, overrides, `longhaul config`
// and docs/config.md all walk the same list. Knows nothing of files or of the command line.
#pragma once

#include <functional>
#include <limits>
#include <string>
#include <variant>
#include <vector>

#include "longhaul/config/job_config.h"

namespace longhaul {

using Value =
    std::variant<bool, int64_t, double, std::string, Strings, Integers, Mix, std::optional<int64_t>,
                 std::optional<double>, std::optional<std::string>, std::optional<StringLists>>;

// What a number or string may be. For a list the choices hold for each element.
struct Limits {
  double min = -std::numeric_limits<double>::infinity();
  double max = std::numeric_limits<double>::infinity();
  bool exclude_min = false;
  bool exclude_max = false;
  bool minus_one = false;  // -1 is allowed beside the range
  bool infinite = false;   // inf is allowed
  Strings choices = {};

  bool holds(double number) const;
  std::string text() const;  // ">= 1", "-1 or >= 1", "a, b, c"; empty when anything goes
};

enum class Provenance { kTorchTitan, kRecipe, kLonghaul };

struct Option {
  std::string key;      // "training.seq_len"
  std::string section;  // "training"
  std::string name;     // "seq_len"
  std::string alias;    // another key that means the same, or empty
  Limits limits;
  std::string help;
  Provenance provenance = Provenance::kTorchTitan;
  std::function<Value(const JobConfig&)> get;
  std::function<void(JobConfig&, Value)> set;

  Value default_value() const { return get(JobConfig{}); }
  std::string type_name() const;  // "int", "float", "list of str", ...
  bool is_bool() const;
};

// All options, section by section in the order of the documentation.
const std::vector<Option>& options();

// The option with this key or alias, or null.
const Option* find_option(const std::string& key);

// The names of all sections ("training.dataloader" and "training" alike), in order.
Strings section_names();

// A value as TOML text; "" for an optional that is not set.
std::string toml_text(const Value& value);

std::string to_string(Provenance provenance);

// True when every option has the same value in both (origins are not compared).
bool same_values(const JobConfig& a, const JobConfig& b);

}  // namespace longhaul
