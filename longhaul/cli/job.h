// The job that the words behind a command describe. For the commands that cannot do without one.
#pragma once

#include "longhaul/config/load.h"

namespace CLI {
class App;
}

namespace longhaul::cli {

// UserError if the command line names neither a job file nor any setting.
CommandLineJob load_job_of(const CLI::App& command);

}  // namespace longhaul::cli
