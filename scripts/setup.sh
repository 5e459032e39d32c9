#!/usr/bin/env bash
# Installs what building and running longhaul needs on Debian 12: Debian packages, and libtorch and
# Arrow (which reads Parquet) from their PyPI wheels in a virtual environment in a per-user cache.
# What is there already is left alone.
#   scripts/setup.sh --fuzz   also installs what the preset `fuzz` needs (Clang's libFuzzer)
#   LONGHAUL_CACHE     another place for the cache (default: ~/.cache/longhaul)
#   LONGHAUL_LIBTORCH  a libtorch 2.11 of your own (the folder with include/ and lib/): none is installed
#   LONGHAUL_ARROW     an Arrow of your own (pyarrow's folder, with include/): none is installed
#   LONGHAUL_CUDA      off: never install the wheels that libtorch's CUDA half needs
set -euo pipefail
cd "$(dirname "$0")/.."

packages=(g++ cmake ninja-build ccache pkg-config python3 python3-venv git ca-certificates
  libtomlplusplus-dev libcli11-dev libspdlog-dev libfmt-dev nlohmann-json3-dev libsimdjson-dev
  libpcre2-dev libicu-dev libxxhash-dev zlib1g-dev libzstd-dev libgtest-dev libgmock-dev libbenchmark-dev)
case "${1:-}" in
  "") ;;
  --fuzz) packages+=(clang libclang-rt-14-dev libomp-dev) ;;
  *)
    echo "setup: unknown argument '$1' (there is --fuzz)" >&2
    exit 2
    ;;
esac
torch_version=2.11.0
arrow_wheel=pyarrow==26.0.1
cache="${LONGHAUL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/longhaul}"

say() { printf '%s\n' "setup: $*"; }

missing_packages() {
  local package
  for package in "${packages[@]}"; do
    dpkg-query -W -f='${db:Status-Abbrev}' "$package" 2>/dev/null | grep -q '^ii' || echo "$package"
  done
}

# Runs a command with its output in a log; on a terminal one line says for how long it has run,
# elsewhere a plain line says what has begun.
run_phase() {
  local label="$1" log started pid
  shift
  [ -t 2 ] || say "$label ..."
  log="$(mktemp)"
  started=$SECONDS
  "$@" >"$log" 2>&1 &
  pid=$!
  # A script's background jobs do not see Ctrl-C.
  trap 'kill "$pid" 2>/dev/null; exit 130' INT TERM
  while kill -0 "$pid" 2>/dev/null; do
    [ -t 2 ] && printf '\r\033[K%s: %s ... %ss' setup "$label" "$((SECONDS - started))" >&2
    sleep 0.5
  done
  [ -t 2 ] && printf '\r\033[K' >&2
  if ! wait "$pid"; then
    tail -n 20 "$log" >&2
    say "$label failed; the last lines are above" >&2
    rm -f "$log"
    exit 1
  fi
  trap - INT TERM
  say "$label: done in $((SECONDS - started))s"
  rm -f "$log"
}

install_packages() {
  local missing as_root=()
  mapfile -t missing < <(missing_packages)
  if [ "${#missing[@]}" -eq 0 ]; then
    say "Debian packages are there"
    return
  fi
  if [ "$(id -u)" -ne 0 ]; then
    # Without somebody to type a password it must not be asked for.
    local check=(sudo -n true)
    if [ -t 0 ]; then check=(sudo -v); fi
    if ! command -v sudo >/dev/null || ! "${check[@]}"; then
      say "packages are missing and this user may not install them; ask an administrator for:" >&2
      echo "  apt-get install -y --no-install-recommends ${missing[*]}" >&2
      exit 1
    fi
    as_root=(sudo)
  fi
  run_phase "package lists" "${as_root[@]}" apt-get update
  run_phase "${#missing[@]} Debian packages" "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y --no-install-recommends "${missing[@]}"
}

# The CUDA half of the wheel wants these beside a CUDA toolkit (its loader path points at them).
cuda_wheels() {
  if [ "${LONGHAUL_CUDA:-auto}" != off ] && command -v nvcc >/dev/null; then
    echo "nvidia-cusparselt-cu13==0.8.0 nvidia-nvshmem-cu13==3.4.5 nvidia-cufile==1.15.*"
  fi
}

# install_wheels STAMP NAME WHEEL...: into the virtual environment, once.
install_wheels() {
  local venv="$cache/libtorch-$torch_version" name="$2" stamp wheels
  stamp="$venv/$1"
  shift 2
  wheels="$*"
  if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wheels" ]; then
    say "$name is there"
    return
  fi
  mkdir -p "$cache"
  [ -x "$venv/bin/pip" ] || run_phase "virtual environment" python3 -m venv "$venv"
  run_phase "$name" "$venv/bin/pip" install --no-deps --disable-pip-version-check "$@"
  echo "$wheels" >"$stamp"
}

install_libtorch() {
  if [ -n "${LONGHAUL_LIBTORCH:-}" ]; then
    say "libtorch: LONGHAUL_LIBTORCH = $LONGHAUL_LIBTORCH"
    return
  fi
  # shellcheck disable=SC2046  # the wheels are words
  install_wheels .installed "libtorch $torch_version (530 MB)" "torch==$torch_version" \
    "nvidia-cuda-runtime==13.0.*" "nvidia-cuda-cupti==13.0.*" $(cuda_wheels)
}

install_arrow() {
  if [ -n "${LONGHAUL_ARROW:-}" ]; then
    say "Arrow: LONGHAUL_ARROW = $LONGHAUL_ARROW"
    return
  fi
  install_wheels .installed-arrow "Arrow (50 MB)" "$arrow_wheel"
}

install_packages
install_libtorch
install_arrow
say "ready: cmake --preset release && cmake --build --preset release"
