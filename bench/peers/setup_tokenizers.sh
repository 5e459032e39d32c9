#!/usr/bin/env bash
# Installs Hugging Face's `tokenizers` package into the per-user cache (once, about 30 MB) and prints
# the Python to run it with. longhaul itself never uses it.
set -euo pipefail

cache="${LONGHAUL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/longhaul}"
venv="$cache/peer-tokenizers-0.23.3"
if [ ! -e "$venv/complete" ]; then
  echo "installing tokenizers 0.23.3 into $venv" >&2
  rm -rf "$venv"
  mkdir -p "$cache"
  "${PYTHON:-python3}" -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check tokenizers==0.23.3 xxhash >&2
  touch "$venv/complete"
fi
echo "$venv/bin/python"
