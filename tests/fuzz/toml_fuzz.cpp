// Fuzzes the reading of a job file: TOML, options, their checks. A libFuzzer target under
// AddressSanitizer and UndefinedBehaviorSanitizer.
//
//   scripts/build.sh fuzz toml_fuzz
//   build/fuzz/bin/toml_fuzz -max_total_time=600 -rss_limit_mb=2048 -timeout=20
//     -dict=tests/fuzz/toml.dict CORPUS configs    # on one line; CORPUS: an empty folder
//
// A broken or hostile file has to end in a UserError. Beside the sanitizers' reports, other
// exceptions and hangs it fails where a job that was accepted is not the same job when it is
// written and read again.
#include <cstdio>
#include <cstdlib>
#include <string>

#include "longhaul/base/error.h"
#include "longhaul/config/load.h"
#include "longhaul/config/write.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  std::string written;
  try {
    written = longhaul::to_toml(longhaul::parse_job(text, "fuzzed.toml"));
  } catch (const longhaul::UserError&) {
    return 0;
  }
  const std::string again = longhaul::to_toml(longhaul::parse_job(written, "written.toml"));
  if (again != written) {
    std::fprintf(stderr, "toml_fuzz: a job changes as it is written and read again\n%s\n%s\n",
                 written.c_str(), again.c_str());
    std::abort();
  }
  return 0;
}
