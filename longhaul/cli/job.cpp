#include "longhaul/cli/job.h"

#include <CLI/CLI.hpp>

#include "longhaul/base/error.h"

namespace longhaul::cli {

CommandLineJob load_job_of(const CLI::App& command) {
  CommandLineJob job = load_command_line(command.remaining());
  if (job.file.empty() && job.config.origins.empty()) {
    fail_user("which job? Example: longhaul {} configs/quickstart.toml", command.get_name());
  }
  return job;
}

}  // namespace longhaul::cli
