// `longhaul comm show`: what the ranks of a job that failed were communicating.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>

#include "longhaul/cli/commands.h"
#include "longhaul/dtensor/trace_report.h"

namespace longhaul::cli {
namespace {

void show(const std::string& folder, size_t last) {
  const auto traces = dtensor::read_traces(folder);
  fmt::print("{} of {} ranks in {}\n{}", traces.size(), traces.front().ranks, folder,
             dtensor::report_table(traces));
  for (const auto& trace : traces) {
    fmt::print("rank {}: {}\n", trace.rank, trace.reason);
    if (last > 0) fmt::print("{}", dtensor::records_table(trace, last));
  }
}

}  // namespace

void add_comm_command(CLI::App& app) {
  auto* comm = app.add_subcommand("comm", "Look at what ranks communicated");
  comm->require_subcommand(1);
  comm->footer("Example:\n  longhaul comm show runs/quickstart/comm_traces");
  auto* command = comm->add_subcommand(
      "show",
      "In which collective each rank of a failed job was, and the first one that not all began");
  auto folder = std::make_shared<std::string>();
  auto last = std::make_shared<size_t>(0);
  command->add_option("folder", *folder, "The folder of the traces")->required();
  command->add_option("--last", *last, "Also each rank's last collectives, so many");
  command->footer("Example:\n  longhaul comm show runs/quickstart/comm_traces --last 20");
  command->callback([folder, last] { show(*folder, *last); });
}

}  // namespace longhaul::cli
