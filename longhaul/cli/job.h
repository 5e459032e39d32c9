// The job that the words behind a command describe. For the commands that cannot do without one.
#pragma once

#include <string>
#include <vector>

#include "longhaul/base/file.h"
#include "longhaul/config/load.h"

namespace CLI {
class App;
}

namespace longhaul::cli {

// UserError if the command line names neither a job file nor any setting.
CommandLineJob load_job_of(const CLI::App& command);

// The same for a command whose words other processes get, too. A job file that can be read only
// once (a pipe, as of `train <(...)`) is kept in memory, where processes started by this one read
// it under another name.
struct InheritedJob {
  JobConfig config;
  std::vector<std::string> words;  // for them, the command's name first
  FileDescriptor kept;             // open as long as they are to read it
};
InheritedJob load_inherited_job_of(const CLI::App& command);

}  // namespace longhaul::cli
