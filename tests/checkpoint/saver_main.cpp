// A process for tests to kill: saves one snapshot. Usage: checkpoint_saver <folder> <step>.
#include <cstdio>
#include <cstdlib>

#include "tests/checkpoint/snapshots.h"

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  try {
    longhaul::checkpoint::save(argv[1], longhaul::checkpoint::make_snapshot(std::atol(argv[2])));
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
