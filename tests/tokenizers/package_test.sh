#!/usr/bin/env bash
# package_test.py in a virtual environment of its own, with `tokenizers` from the package index.
set -euo pipefail
cd "$(dirname "$0")/../.."
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check tokenizers==0.23.3
"$work/venv/bin/python" tests/tokenizers/package_test.py "$1" "$work"
