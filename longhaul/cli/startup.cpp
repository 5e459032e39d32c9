#include "longhaul/cli/startup.h"

#include <unistd.h>

#include <cstdlib>
#include <string_view>

namespace longhaul::cli {
namespace {

bool computes(char** argv) {
  if (!argv[0] || !argv[1]) return false;
  const std::string_view command = argv[1];
  return command != "config" && command != "version" && !command.starts_with('-');
}

}  // namespace

void restart_with_passive_openmp(char** argv) {
  if (std::getenv("OMP_WAIT_POLICY") || !computes(argv)) return;
  setenv("OMP_WAIT_POLICY", "passive", 1);
  execv("/proc/self/exe", argv);  // returns only if it failed
}

}  // namespace longhaul::cli
