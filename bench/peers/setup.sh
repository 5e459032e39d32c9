#!/usr/bin/env bash
# Installs PyTorch for the benchmarks' peers into the per-user cache (once, about 600 MB) and prints
# the Python to run them with. longhaul itself needs none of this.
#
# The wheel is the CUDA build, the only one in the registry for x86. Its Python module is linked to
# large GPU libraries that a CPU run never calls. Empty libraries of their names, and
# binding names at the first call instead of at load time, make `import torch` work without them.
# Of the wheel's Python dependencies only those are installed that training and torch.compile need.
set -euo pipefail

cache="${LONGHAUL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/longhaul}"
venv="$cache/peer-torch-2.11.0"
python="$venv/bin/python"

if [ -e "$venv/complete" ]; then
  echo "$python"
  exit 0
fi

echo "installing PyTorch 2.11.0 into $venv" >&2
rm -rf "$venv"
mkdir -p "$cache"
"${PYTHON:-python3}" -m venv "$venv"
"$python" -m pip install --quiet --disable-pip-version-check --no-deps \
  torch==2.11.0 typing-extensions sympy==1.14.0 mpmath==1.3.0 \
  filelock networkx jinja2 markupsafe fsspec \
  'nvidia-cuda-runtime==13.0.*' 'nvidia-cuda-cupti==13.0.*' >&2

packages="$("$python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')"
for library in libcublas.so.13 libcublasLt.so.13 libcudnn.so.9 libcufft.so.12 libcufile.so.0 \
  libcurand.so.10 libcusparse.so.12 libcusparseLt.so.0 libnccl.so.2 libnvshmem_host.so.3; do
  # torch/lib is on the wheel's own search path, before any CUDA toolkit of the system.
  "${CC:-cc}" -shared -nostdlib -x c /dev/null -Wl,-soname,"$library" \
    -o "$packages/torch/lib/$library"
done
echo 'import os, sys; sys.setdlopenflags(os.RTLD_LAZY)' >"$packages/bind_lazily.pth"

"$python" -W ignore -c '
import torch
torch.optim.AdamW([torch.zeros(2, requires_grad=True)], fused=True)
assert torch.__version__.startswith("2.11.0") and not torch.cuda.is_available()
' >&2 || {
  echo "error: PyTorch does not start in $venv; run $0 again or set CC to a C compiler" >&2
  exit 1
}
touch "$venv/complete"
echo "$python"
