#!/usr/bin/env bash
# export_test.py in a virtual environment of its own: PyTorch as bench/peers/setup.sh has it, and
# transformers from the package index.
set -euo pipefail
cd "$(dirname "$0")/../.."
python="$(bench/peers/setup.sh)"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"$python" -m venv "$work/venv"
packages() { "$1" -c 'import sysconfig; print(sysconfig.get_path("platlib"))'; }
echo "import site; site.addsitedir('$(packages "$python")')" \
  >"$(packages "$work/venv/bin/python")/torch_of_the_peers.pth"
"$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
  transformers==5.23.0 safetensors numpy pyyaml psutil
# Of FP8 transformers asks for it; --no-deps, since PyTorch is there.
"$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps \
  accelerate==1.15.0
"$work/venv/bin/python" -W ignore tests/transformers/export_test.py "$1" "$work"
