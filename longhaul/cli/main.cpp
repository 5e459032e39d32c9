// The program: reads the command line, runs one command and turns failures into one line on stderr
// and an exit status: 0 fine, 1 failed while running, 2 the user's mistake.
#include <fmt/format.h>
#include <sys/prctl.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <exception>

#include "longhaul/base/error.h"
#include "longhaul/base/fault.h"
#include "longhaul/base/log.h"
#include "longhaul/base/text.h"
#include "longhaul/cli/commands.h"
#include "longhaul/cli/crash_handler.h"
#include "longhaul/cli/failure.h"
#include "longhaul/cli/failure_report.h"
#include "longhaul/cli/startup.h"
#include "longhaul/dtensor/communicator.h"
#include "longhaul/ops/cpu_allocator.h"

namespace longhaul::cli {
namespace {

// After what was printed so far, also where both go to one file.
int fail(int status, const std::string& message, bool of_another_rank = false) {
  std::fflush(stdout);
  fmt::print(stderr, "error: {}\n", message);
  report_failure({message, of_another_rank});
  return status;
}

void add_commands(CLI::App& app) {
  app.require_subcommand(1);
  app.footer("Example:\n  longhaul train configs/quickstart.toml");
  add_checkpoint_command(app);
  add_comm_command(app);
  add_compare_command(app);
  add_config_command(app);
  add_convert_command(app);
  add_data_command(app);
  add_eval_command(app);
  add_generate_command(app);
  add_report_command(app);
  add_tokenizer_command(app);
  add_train_command(app);
  add_version_command(app);
}

// A word that CLI11 could not place is most often a mistyped command. Other mistakes it words
// itself: then what is left over are the job file and its settings.
std::string parse_error(const CLI::App& app, const CLI::ParseError& error) {
  const CLI::App* last = &app;
  while (!last->get_subcommands().empty()) last = last->get_subcommands().back();
  std::vector<std::string> names;
  for (const auto* command : last->get_subcommands({})) names.push_back(command->get_name());
  const bool misplaced = dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr ||
                         dynamic_cast<const CLI::RequiredError*>(&error) != nullptr;
  const auto extras = last->remaining();
  const std::string what =
      !misplaced || extras.empty()
          ? std::string(error.what())
          : fmt::format("unknown word '{}'{}", extras[0], did_you_mean(extras[0], names));
  return fmt::format("{}; see `longhaul --help`", what);
}

int run(int argc, char** argv) {
  CLI::App app{"longhaul: pre-training of DeepSeek-V3.2-style models on long sequences",
               "longhaul"};
  try {
    fault::announce();
    add_commands(app);
    app.parse(argc, argv);
    flush_standard_output();
    return 0;
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);
    return fail(2, parse_error(app, error));
  } catch (const UserError& error) {
    return fail(2, error.what());
  } catch (const dtensor::CollectiveError& error) {
    return fail(1, one_line(error), /*of_another_rank=*/true);
  } catch (const std::exception& error) {
    return fail(1, one_line(error));
  }
}

}  // namespace
}  // namespace longhaul::cli

int main(int argc, char** argv) {
  longhaul::cli::restart_with_process_policy(argv);
  ::prctl(PR_SET_NAME, "longhaul");  // not that of the link that it has restarted itself through
  longhaul::cli::install_crash_handler();
  longhaul::ops::install_cpu_allocator();
  const char* no_color = std::getenv("NO_COLOR");
  longhaul::log::configure(no_color == nullptr || *no_color == '\0');
  return longhaul::cli::run(argc, argv);
}
