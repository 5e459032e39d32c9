// `longhaul checkpoint show | diff | verify`: weights and checkpoints on disk, without training.
// Results go to stdout. A difference or damage is an Error, so that main exits with 1.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>

#include "longhaul/base/error.h"
#include "longhaul/checkpoint/tools.h"
#include "longhaul/cli/commands.h"

namespace longhaul::cli {
namespace {

constexpr const char* kPathHelp =
    "A step-N folder, a folder of them (the newest), a Hugging Face folder or a .safetensors file";

void show(const std::string& path, bool json) {
  const auto listing = checkpoint::show(path, json);
  if (json) {
    // The path may have any bytes in it, JSON only UTF-8.
    constexpr auto kReplace = nlohmann::json::error_handler_t::replace;
    fmt::print("{}\n", checkpoint::to_json(listing).dump(1, ' ', false, kReplace));
  } else {
    fmt::print("{}", checkpoint::to_text(listing));
  }
}

void print_difference(const checkpoint::Difference& difference) {
  fmt::print("{}: {}", difference.name, difference.what);
  if (difference.max_absolute) {
    fmt::print(", max abs {:.3e}, max rel {:.3e}", *difference.max_absolute,
               difference.max_relative.value_or(0));
  }
  fmt::print("\n");
}

void diff(const std::string& a, const std::string& b, const checkpoint::Tolerance& tolerance) {
  const auto differences = checkpoint::diff(a, b, tolerance);
  for (const auto& difference : differences) print_difference(difference);
  if (!differences.empty()) {
    throw Error(fmt::format("'{}' (A) and '{}' (B) differ in {} tensor{}", a, b, differences.size(),
                            differences.size() == 1 ? "" : "s"));
  }
  fmt::print("no differences\n");
}

void verify(const std::string& path) {
  const auto report = checkpoint::verify(path);
  for (const auto& problem : report.problems) fmt::print("{}\n", problem);
  if (!report.problems.empty()) {
    throw Error(fmt::format("'{}' is damaged: {} problem{}", report.path.string(),
                            report.problems.size(), report.problems.size() == 1 ? "" : "s"));
  }
  fmt::print("{}: {}\n", report.path.string(),
             report.has_checksums ? "complete, all checksums match"
                                  : "complete and well-formed; it carries no checksums");
}

void add_show(CLI::App& checkpoint) {
  auto* command = checkpoint.add_subcommand("show", "What is in it: names, shapes, dtypes, totals");
  auto path = std::make_shared<std::string>();
  auto json = std::make_shared<bool>(false);
  command->add_option("path", *path, kPathHelp)->required();
  command->add_flag("--json", *json, "As JSON, with a checksum of each tensor's global contents");
  command->footer("Example:\n  longhaul checkpoint show outputs/checkpoint/step-100 --json");
  command->callback([path, json] { show(*path, *json); });
}

void add_diff(CLI::App& checkpoint) {
  auto* command =
      checkpoint.add_subcommand("diff", "How two of them differ, by name; exits with 1 if they do");
  struct Arguments {
    std::string a, b;
    checkpoint::Tolerance tolerance;
  };
  auto arguments = std::make_shared<Arguments>();
  command->add_option("a", arguments->a, kPathHelp)->required();
  command->add_option("b", arguments->b, "The other one")->required();
  command
      ->add_option("--rtol", arguments->tolerance.relative,
                   "Values may differ by this times |b| ...")
      ->check(CLI::NonNegativeNumber);
  command->add_option("--atol", arguments->tolerance.absolute, "... plus this")
      ->check(CLI::NonNegativeNumber);
  command->footer(
      "Example:\n  longhaul checkpoint diff run1/checkpoint run2/checkpoint --rtol 1e-5");
  command->callback([arguments] { diff(arguments->a, arguments->b, arguments->tolerance); });
}

void add_verify(CLI::App& checkpoint) {
  auto* command = checkpoint.add_subcommand(
      "verify", "Reads every byte and names what is damaged; exits with 1 if anything is");
  auto path = std::make_shared<std::string>();
  command->add_option("path", *path, kPathHelp)->required();
  command->footer("Example:\n  longhaul checkpoint verify outputs/checkpoint");
  command->callback([path] { verify(*path); });
}

}  // namespace

void add_checkpoint_command(CLI::App& app) {
  auto* command = app.add_subcommand("checkpoint", "Look at checkpoints and weights on disk");
  command->require_subcommand(1);
  command->footer("Example:\n  longhaul checkpoint show outputs/checkpoint");
  add_show(*command);
  add_diff(*command);
  add_verify(*command);
}

}  // namespace longhaul::cli
