#!/usr/bin/env bash
# package_test.py in a virtual environment of its own, with `tensorboard` from the package index.
set -euo pipefail
cd "$(dirname "$0")/../.."
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check tensorboard==2.20.0 'setuptools<81'
"$work/venv/bin/python" tests/tensorboard/package_test.py "$1" "$work"
