#!/usr/bin/env bash
# Formatting and static analysis: scripts/lint.sh [FILE...] (default: every C++ file of the
# repository). Needs clang-format and clang-tidy (Debian: apt install clang-format clang-tidy) and a
# configured release build. clang-tidy takes about 20 s a file that includes libtorch; with
# --format only the formatting is looked at.
set -euo pipefail
cd "$(dirname "$0")/.."
only_format=false
if [ "${1:-}" = "--format" ]; then
  only_format=true
  shift
fi
files=("$@")
[ "${#files[@]}" -gt 0 ] || mapfile -t files < <(git ls-files '*.cpp' '*.h')
for tool in clang-format clang-tidy; do
  command -v "$tool" >/dev/null || { echo "lint: $tool is missing: apt install $tool" >&2; exit 1; }
done
clang-format --dry-run --Werror "${files[@]}"
if "$only_format"; then exit 0; fi
commands=build/release/compile_commands.json
[ -f "$commands" ] || { echo "lint: no $commands: run scripts/build.sh first" >&2; exit 1; }
# The precompiled header is GCC's; each file names what it needs, so clang does without it.
database="$(mktemp -d)"
trap 'rm -rf "$database"' EXIT
sed -e 's/-Winvalid-pch\|-Wno-restrict\|-Wno-psabi\|-m\(move\|store\)-max=256//g' -e 's/-include [^ ]*cmake_pch\.hxx//g' "$commands" \
  >"$database/compile_commands.json"
for file in "${files[@]}"; do
  case "$file" in
    *.cpp) clang-tidy --quiet -p "$database" "$file" ;;
  esac
done
