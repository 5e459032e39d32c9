// `longhaul report`: runs as one page that opens in any browser.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>

#include "longhaul/base/file.h"
#include "longhaul/cli/commands.h"
#include "longhaul/train/results/report.h"

namespace longhaul::cli {
namespace {

void report(const std::vector<std::string>& folders, std::string output) {
  const std::vector<fs::path> runs(folders.begin(), folders.end());
  const std::string page = train::report_page(runs);
  if (output.empty()) output = (runs.front() / "report.html").string();
  write_atomic(output, page);
  fmt::print("{}\n", output);
}

}  // namespace

void add_report_command(CLI::App& app) {
  auto* command = app.add_subcommand(
      "report", "One page with the curves of one or more runs, for a browser without a network");
  auto runs = std::make_shared<std::vector<std::string>>();
  auto output = std::make_shared<std::string>();
  command->add_option("runs", *runs, "The folders of runs; several are laid over each other")
      ->required();
  command->add_option("--output,-o", *output,
                      "The file to write (default: report.html in the first folder)");
  command->footer("Example:\n  longhaul report runs/quickstart --output report.html");
  command->callback([runs, output] { report(*runs, *output); });
}

}  // namespace longhaul::cli
