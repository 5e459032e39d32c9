// Whether two runs computed the same numbers: for a change that must not alter them. Reads run
// folders only. Called by `longhaul compare`.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace longhaul::train {

struct CompareOptions {
  double rtol = 0;    // |a - b| <= rtol * max(|a|, |b|); 0: bit for bit
  int64_t steps = 0;  // only the first so many, which both must have; 0: all, and the same ones
};

// One figure over all steps.
struct FigureDifference {
  std::string name;                     // "lm_loss"
  int64_t steps = 0;                    // that were compared
  double largest = 0;                   // |a - b|; infinite where only one of them is a number
  double largest_relative = 0;          // the same over max(|a|, |b|)
  int64_t largest_step = 0;             // of the relative one; 0 if all are equal
  std::optional<int64_t> first_beyond;  // the first step beyond the tolerance
  // Steps at which only one run has it. That differs, but for the validation loss, which runs may
  // take at steps of their own: it is compared where both have it.
  std::vector<int64_t> only_in_one = {};
};

struct Comparison {
  std::vector<FigureDifference> figures;
  std::vector<int64_t> only_in_a, only_in_b;  // steps
  bool equal() const;                         // nothing beyond the tolerance
};

// Of the losses, the gradient norm, the learning rate and the validation loss. UserError if a
// folder is no run, or if options.steps asks for steps that one of them has not.
Comparison compare_runs(const std::filesystem::path& a, const std::filesystem::path& b,
                        const CompareOptions& options);

// A row a figure.
std::string to_table(const Comparison& comparison);
// In one line: that they are the same, or what differs first.
std::string verdict(const Comparison& comparison, const CompareOptions& options);

}  // namespace longhaul::train
