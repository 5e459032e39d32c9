#!/usr/bin/env bash
# Builds what changed and runs the test suite: scripts/test.sh [PRESET [ctest options]].
# Long tests carry the label "slow"; `scripts/test.sh release -LE slow` leaves them out.
set -euo pipefail
cd "$(dirname "$0")/.."
preset="${1:-release}"
shift || true
scripts/build.sh "$preset"
log="build/$preset/Testing/Temporary/LastTest.log"
ctest --preset "$preset" "$@" || {
  status=$?
  # ctest ends with the names of suites: what failed in them is told once more, last.
  {
    grep -aE -A 8 ': Failure$' "$log" | tail -n 60
    grep -aE '^\[  FAILED  \] .*\([0-9]+ ms\)$' "$log"
  } >&2 || true
  exit "$status"
}
