#!/usr/bin/env bash
# Runs the benchmarks of bench/ and compares their figures with the goals:
#   scripts/bench.sh [NAME...] [--json]
# docs/benchmarks.md describes them.
set -euo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
exec python3 "$root/bench/lib/run.py" --folder "$root/bench" "$@"
