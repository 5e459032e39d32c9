// How the option table is written: a section, then one line a key. Only option_table*.cpp use it.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "longhaul/config/option.h"

namespace longhaul {

inline Limits anything() { return {}; }
inline Limits at_least(double min) { return {.min = min}; }
inline Limits above(double min) { return {.min = min, .exclude_min = true}; }
inline Limits above_or_inf(double min) {
  return {.min = min, .exclude_min = true, .infinite = true};
}
inline Limits between(double min, double max) { return {.min = min, .max = max}; }
inline Limits fraction_below_one() { return {.min = 0, .max = 1, .exclude_max = true}; }
inline Limits minus_one_or_at_least(double min) { return {.min = min, .minus_one = true}; }
inline Limits one_of(Strings choices) { return {.choices = std::move(choices)}; }

// `part` maps a JobConfig, const or not, to the struct whose members are added.
template <typename Part>
class OptionSection {
 public:
  OptionSection(std::vector<Option>& table, std::string name, Part part)
      : table_(table), name_(std::move(name)), part_(part) {}

  // A key of TorchTitan's.
  template <typename S, typename T>
  void key(const char* name, T S::*member, const char* help, Limits limits = {}) {
    add(name, member, help, std::move(limits), Provenance::kTorchTitan);
  }

  // A key that the DeepSeek-V3.2 recipe adds to TorchTitan.
  template <typename S, typename T>
  void recipe(const char* name, T S::*member, const char* help, Limits limits = {}) {
    add(name, member, help, std::move(limits), Provenance::kRecipe);
  }

  // A key of longhaul's own.
  template <typename S, typename T>
  void own(const char* name, T S::*member, const char* help, Limits limits = {},
           const char* alias = "") {
    add(name, member, help, std::move(limits), Provenance::kLonghaul);
    table_.back().alias = alias;
  }

 private:
  template <typename S, typename T>
  void add(const char* name, T S::*member, const char* help, Limits limits, Provenance provenance) {
    Option option;
    option.key = name_ + "." + name;
    option.section = name_;
    option.name = name;
    option.limits = std::move(limits);
    option.help = help;
    option.provenance = provenance;
    option.get = [part = part_, member](const JobConfig& config) -> Value {
      return Value(std::in_place_type<T>, part(config).*member);
    };
    option.set = [part = part_, member](JobConfig& config, Value value) {
      part(config).*member = std::get<T>(std::move(value));
    };
    table_.push_back(std::move(option));
  }

  std::vector<Option>& table_;
  std::string name_;
  Part part_;
};

// The parts of the table, in the order of the documentation.
void add_run_options(std::vector<Option>& table);       // job, profiling, metrics, debug, ...
void add_model_options(std::vector<Option>& table);     // model, dsa, moe, mtp, quantize
void add_training_options(std::vector<Option>& table);  // training, optimizer, validation, ...
void add_parallel_options(std::vector<Option>& table);  // parallelism, comm, fault_tolerance

}  // namespace longhaul
