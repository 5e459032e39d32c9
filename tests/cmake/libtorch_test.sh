#!/usr/bin/env bash
# Which libtorch a configure finds: every place where wheels keep their OpenMP library, and another
# installation when LONGHAUL_LIBTORCH changes in a build folder that was configured before.
set -euo pipefail
project="$(cd "$(dirname "$0")" && pwd)/project"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
unset LONGHAUL_LIBTORCH
# Arrow is not looked for where libtorch is.
export LONGHAUL_ARROW="$work/pyarrow"
mkdir -p "$LONGHAUL_ARROW/include/parquet/arrow"
touch "$LONGHAUL_ARROW/include/parquet/arrow/reader.h" "$LONGHAUL_ARROW/libarrow.so.2600" \
  "$LONGHAUL_ARROW/libparquet.so.2600"

# An installation of empty files: make_torch <name> <its OpenMP library, from the torch folder>
make_torch() {
  local root="$work/$1/torch"
  mkdir -p "$root/include/ATen" "$root/lib" "$(dirname "$root/$2")"
  touch "$root/include/ATen/ATen.h" "$root/lib/libtorch_cpu.so" "$root/lib/libc10.so" "$root/$2"
  echo "__version__ = '2.11.0'" >"$root/version.py"
}

configure() {
  cmake -S "$project" -B "$work/build" -DLONGHAUL_CUDA=off "$@" 2>&1 || true
}

expect() {
  local name="$1" gomp="$2" output="$3"
  if ! grep -qF -- "-- found $work/$name/torch/lib/libtorch_cpu.so with " <<<"$output" ||
    ! grep -qE "^-- found .*/$gomp\$" <<<"$output"; then
    printf 'expected %s with %s, but:\n%s\n' "$name" "$gomp" "$output" >&2
    exit 1
  fi
}

make_torch plain lib/libgomp.so.1
make_torch hashed lib/libgomp-24e2ab19.so.1
make_torch beside ../torch.libs/libgomp-98b21ff3.so.1.0.0

expect plain 'libgomp\.so\.1' "$(configure -DLONGHAUL_LIBTORCH="$work/plain/torch")"
expect hashed 'libgomp-24e2ab19\.so\.1' "$(configure -DLONGHAUL_LIBTORCH="$work/hashed/torch")"
expect hashed 'libgomp-24e2ab19\.so\.1' "$(configure)"
export LONGHAUL_LIBTORCH="$work/beside/torch"
expect beside 'torch\.libs/libgomp-98b21ff3\.so\.1\.0\.0' "$(configure)"
# The environment is as it was: what is asked for by name holds.
expect plain 'libgomp\.so\.1' "$(configure -DLONGHAUL_LIBTORCH="$work/plain/torch")"
expect plain 'libgomp\.so\.1' "$(configure)"

rm "$work/plain/torch/lib/libgomp.so.1"
output="$(configure)"
grep -qF "libtorch 2.11 not found (looked in '$work/plain/torch')" <<<"$output" || {
  printf 'expected an error, but:\n%s\n' "$output" >&2
  exit 1
}
