#!/usr/bin/env bash
# Configures (once) and builds a preset: scripts/build.sh [PRESET [TARGET...]]. On a terminal one line
# says how far it is, elsewhere plain lines; the compiler's messages are shown when something fails.
set -euo pipefail
cd "$(dirname "$0")/.."
preset="${1:-release}"
shift || true

started=$SECONDS
log="$(mktemp)"
trap 'rm -f "$log"' EXIT
if ! cmake --preset "$preset" >"$log" 2>&1; then
  cat "$log" >&2
  exit 1
fi
grep -- '-- longhaul:' "$log" | sed 's/^-- /build: /' || true

# ccache then does not read the precompiled headers (half a gigabyte each) anew for each file.
export CCACHE_INODECACHE="${CCACHE_INODECACHE:-1}"
targets=()
[ "$#" -gt 0 ] && targets=(--target "$@")
# Ninja's status line is "[done/total] ...".
show_progress() {
  local line last=$SECONDS
  while IFS= read -r line; do
    printf '%s\n' "$line" >>"$log"
    if [[ "$line" =~ ^\[([0-9]+/[0-9]+)\] ]]; then
      if [ -t 2 ]; then
        printf '\r\033[Kbuild: %s, %ss' "${BASH_REMATCH[1]}" "$((SECONDS - started))" >&2
      elif [ $((SECONDS - last)) -ge 30 ]; then
        last=$SECONDS
        printf 'build: %s, %ss\n' "${BASH_REMATCH[1]}" "$((SECONDS - started))"
      fi
    fi
  done
  [ -t 2 ] && printf '\r\033[K' >&2
  return 0
}
if ! cmake --build --preset "$preset" ${targets[@]+"${targets[@]}"} 2>&1 | show_progress; then
  grep -v '^\[[0-9]*/[0-9]*\] \(Building\|Linking\)' "$log" | tail -n 60 >&2
  echo "build: failed; the messages are above" >&2
  exit 1
fi
echo "build: preset $preset is up to date ($((SECONDS - started))s)"
