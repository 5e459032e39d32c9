#!/usr/bin/env bash
# Prints the folder of Arrow and Parquet (the wheel pyarrow) that scripts/setup.sh installed, or
# nothing. The per-user cache can be moved with LONGHAUL_CACHE.
set -euo pipefail
if [ -n "${LONGHAUL_ARROW:-}" ]; then
  echo "$LONGHAUL_ARROW"
  exit 0
fi
cache="${LONGHAUL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/longhaul}"
for dir in "$cache"/libtorch-2.11.0/lib/python3*/site-packages/pyarrow; do
  if [ -d "$dir/include/parquet" ]; then
    echo "$dir"
    exit 0
  fi
done
