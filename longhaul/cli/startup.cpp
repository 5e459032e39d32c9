#include "longhaul/cli/startup.h"

#include <unistd.h>

#include <cstdlib>
#include <string_view>

namespace longhaul::cli {
namespace {

bool computes(char** argv) {
  if (!argv[0] || !argv[1]) return false;
  const std::string_view command = argv[1];
  for (const char* reads_only : {"compare", "config", "report", "version"}) {
    if (command == reads_only) return false;
  }
  return !command.starts_with('-');
}

}  // namespace

void restart_with_process_policy(char** argv) {
  if (std::getenv("OMP_WAIT_POLICY") && std::getenv("MALLOC_TRIM_THRESHOLD_")) return;
  if (!computes(argv)) return;
  constexpr int kKeepTheUsers = 0;
  if (!std::getenv("OMP_WAIT_POLICY")) setenv("GOMP_SPINCOUNT", "3000", kKeepTheUsers);
  setenv("OMP_WAIT_POLICY", "passive", kKeepTheUsers);
  setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1", kKeepTheUsers);
  setenv("MALLOC_MMAP_MAX_", "0", kKeepTheUsers);
  setenv("MALLOC_TRIM_THRESHOLD_", "281474976710656", kKeepTheUsers);  // 2^48: never
  setenv("MALLOC_TOP_PAD_", "67108864", kKeepTheUsers);                // grow by 64 MiB
  execv("/proc/self/exe", argv);                                       // returns only if it failed
}

}  // namespace longhaul::cli
