#!/usr/bin/env bash
# Prints the folder of a wheel that scripts/setup.sh installed, or nothing: `torch` (libtorch, with
# include/ and lib/) or `pyarrow` (Arrow and Parquet, with include/). LONGHAUL_LIBTORCH and
# LONGHAUL_ARROW name others; the per-user cache can be moved with LONGHAUL_CACHE.
set -euo pipefail
case "$1" in
  torch) own="${LONGHAUL_LIBTORCH:-}" headers=ATen ;;
  pyarrow) own="${LONGHAUL_ARROW:-}" headers=parquet ;;
  *) echo "wheel_path.sh: '$1' is neither torch nor pyarrow" >&2; exit 2 ;;
esac
if [ -n "$own" ]; then
  echo "$own"
  exit 0
fi
cache="${LONGHAUL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/longhaul}"
for dir in "$cache"/libtorch-2.11.0/lib/python3*/site-packages/"$1"; do
  if [ -d "$dir/include/$headers" ]; then
    echo "$dir"
    exit 0
  fi
done
