#!/usr/bin/env bash
# Prints the folder of libtorch (the one with include/ and lib/) that scripts/setup.sh installed,
# or nothing. The per-user cache can be moved with LONGHAUL_CACHE.
set -euo pipefail
if [ -n "${LONGHAUL_LIBTORCH:-}" ]; then
  echo "$LONGHAUL_LIBTORCH"
  exit 0
fi
cache="${LONGHAUL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/longhaul}"
for dir in "$cache"/libtorch-2.11.0/lib/python3*/site-packages/torch; do
  if [ -d "$dir/include/ATen" ]; then
    echo "$dir"
    exit 0
  fi
done
