// `longhaul compare`: whether two runs computed the same numbers.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>

#include "longhaul/base/error.h"
#include "longhaul/cli/commands.h"
#include "longhaul/train/results/compare.h"

namespace longhaul::cli {
namespace {

struct Words {
  std::string a, b;
  train::CompareOptions options;
};

void compare(const Words& words) {
  if (!(words.options.rtol >= 0)) fail_user("--rtol {}: expected 0 or more", words.options.rtol);
  if (words.options.steps < 0) fail_user("--steps {}: expected 1 or more", words.options.steps);
  const auto comparison = train::compare_runs(words.a, words.b, words.options);
  fmt::print("{}", train::to_table(comparison));
  const std::string verdict = train::verdict(comparison, words.options);
  if (!comparison.equal()) throw Error(verdict);  // exit status 1
  fmt::print("{}\n", verdict);
}

}  // namespace

void add_compare_command(CLI::App& app) {
  auto* command = app.add_subcommand(
      "compare",
      "Whether two runs computed the same losses; exit status 1 if not, 2 if that cannot be told");
  auto words = std::make_shared<Words>();
  command->add_option("run_a", words->a, "The folder of a run")->required();
  command->add_option("run_b", words->b, "The folder of another")->required();
  command->add_option("--rtol", words->options.rtol,
                      "Relative difference that is allowed (default 0: bit for bit)");
  command->add_option("--steps", words->options.steps,
                      "Compare only the first so many steps (default: all, and the same ones)");
  command->footer("Example:\n  longhaul compare runs/before runs/after --rtol 1e-5");
  command->callback([words] { compare(*words); });
}

}  // namespace longhaul::cli
