// `longhaul compare`: whether two runs computed the same numbers.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <optional>

#include "longhaul/base/error.h"
#include "longhaul/cli/commands.h"
#include "longhaul/cli/failure.h"
#include "longhaul/train/results/compare.h"

namespace longhaul::cli {
namespace {

struct Words {
  std::string a, b;
  double rtol = 0;
  std::optional<int64_t> steps;
};

// Prints the differences. What differs first; nothing if the runs are the same.
std::optional<std::string> find_difference(const Words& words) {
  if (!(words.rtol >= 0)) fail_user("--rtol {}: expected 0 or more", words.rtol);
  if (words.steps && *words.steps < 1) fail_user("--steps {}: expected 1 or more", *words.steps);
  const train::CompareOptions options{.rtol = words.rtol, .steps = words.steps.value_or(0)};
  const auto comparison = train::compare_runs(words.a, words.b, options);
  const std::string verdict = train::verdict(comparison, options);
  fmt::print("{}", train::to_table(comparison));
  if (comparison.equal()) fmt::print("{}\n", verdict);
  flush_standard_output();
  return comparison.equal() ? std::nullopt : std::optional(verdict);
}

// Exit status 1 says that the runs differ and nothing else.
void compare(const Words& words) {
  std::optional<std::string> difference;
  try {
    difference = find_difference(words);
  } catch (const std::exception& error) {
    throw UserError(one_line(error));
  }
  if (difference) throw Error(*difference);
}

}  // namespace

void add_compare_command(CLI::App& app) {
  auto* command = app.add_subcommand(
      "compare",
      "Whether two runs computed the same losses; exit status 1 if not, 2 if that cannot be told");
  auto words = std::make_shared<Words>();
  command->add_option("run_a", words->a, "The folder of a run")->required();
  command->add_option("run_b", words->b, "The folder of another")->required();
  command->add_option("--rtol", words->rtol,
                      "Relative difference that is allowed (default 0: bit for bit)");
  command->add_option("--steps", words->steps,
                      "Compare only the first so many steps (default: all, and the same ones)");
  command->footer("Example:\n  longhaul compare runs/before runs/after --rtol 1e-5");
  command->callback([words] { compare(*words); });
}

}  // namespace longhaul::cli
