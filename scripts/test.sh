#!/usr/bin/env bash
# Builds what changed and runs the test suite: scripts/test.sh [PRESET [ctest options]].
# Long tests carry the label "slow"; `scripts/test.sh release -LE slow` leaves them out.
set -euo pipefail
cd "$(dirname "$0")/.."
preset="${1:-release}"
shift || true
scripts/build.sh "$preset"
ctest --preset "$preset" "$@"
