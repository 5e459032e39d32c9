#!/usr/bin/env bash
# library_test.py in a virtual environment of its own, with PyTorch as bench/peers/setup.sh has it.
set -euo pipefail
cd "$(dirname "$0")/../../.."
python="$(bench/peers/setup.sh)"
environment="$(mktemp -d)"
trap 'rm -rf "$environment"' EXIT
"$python" -m venv --without-pip "$environment"
packages() { "$1" -c 'import sysconfig; print(sysconfig.get_path("platlib"))'; }
echo "import site; site.addsitedir('$(packages "$python")')" \
  >"$(packages "$environment/bin/python")/torch_of_the_peers.pth"
"$environment/bin/python" -W ignore tests/ops/python/library_test.py "$1"
