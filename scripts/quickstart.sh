#!/usr/bin/env bash
# From a fresh Debian 12 machine to a trained small DeepSeek-V3.2: installs what is missing, builds,
# prepares data, trains, evaluates, samples. What is done already is skipped. About 20 minutes on two
# cores, of which training at most six. Everything it makes lies in build/ and runs/quickstart/.
set -euo pipefail
cd "$(dirname "$0")/.."

run=runs/quickstart
longhaul=build/release/bin/longhaul
job=configs/quickstart.toml
vocab_size=1024

say() { printf '%s\n' "quickstart: $*"; }

# The source of Python's standard library: real text that every Debian machine has. One file in
# twenty, chosen by a checksum of its name, is held out.
prepare_corpus() {
  local stdlib file name part
  if [ -f "$run/corpus/.complete" ]; then
    say "corpus is there"
    return
  fi
  stdlib="$(python3 -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"
  rm -rf "$run/corpus"
  mkdir -p "$run/corpus/train" "$run/corpus/validation"
  while IFS= read -r file; do
    name="${file#"$stdlib"/}"
    part=train
    if [ $(($(printf '%s' "$name" | cksum | cut -d' ' -f1) % 20)) -eq 0 ]; then part=validation; fi
    cp -- "$file" "$run/corpus/$part/${name//\//.}"
  done < <(find "$stdlib" -name '*.py' -size +0 -not -path '*/test/*' -not -path '*/tests/*' \
    -not -path '*/site-packages/*' -not -path '*/dist-packages/*' | LC_ALL=C sort)
  touch "$run/corpus/.complete"
  say "corpus: $(find "$run/corpus/train" -type f | wc -l) files to learn from," \
    "$(find "$run/corpus/validation" -type f | wc -l) held out, from $stdlib"
}

prepare_tokenizer() {
  if [ -f "$run/tokenizer/tokenizer.json" ]; then
    say "tokenizer is there"
    return
  fi
  mkdir -p "$run/tokenizer"
  "$longhaul" tokenizer train --input "$run/corpus/train" --vocab-size "$vocab_size" \
    --output "$run/tokenizer/tokenizer.json"
}

scripts/setup.sh
scripts/build.sh release longhaul
prepare_corpus
prepare_tokenizer
# Once is enough, also where the time limit ended it before the last step.
if [ -f "$run/.trained" ]; then
  say "training is done (remove $run to begin anew; '$longhaul train $job' goes on)"
else
  # After Ctrl-C or SIGTERM the program has saved and says 0, as at the time limit.
  interrupted=false
  trap 'interrupted=true' INT TERM
  "$longhaul" train "$job" "$@"
  trap - INT TERM
  if "$interrupted"; then
    say "interrupted; the same command goes on with the training"
    exit 130
  fi
  touch "$run/.trained"
fi
if [ ! -f "$run/evaluation.json" ] || [ "$run/metrics.jsonl" -nt "$run/evaluation.json" ]; then
  say "held-out data, beside a bigram model over the same tokens and the model before training:"
  "$longhaul" eval "$job" "$@" --validation.steps -1 --baselines
else
  say "evaluation is there (see $run/summary.md)"
fi
say "a sample:"
"$longhaul" generate "$job" "$@" --prompt 'def read_file(path):' --max-new-tokens 120 \
  --temperature 0.7 --top-p 0.9 --seed 1
"$longhaul" report "$run" >/dev/null
say "done: $run/summary.md, $run/report.html (for a browser), $run/metrics.jsonl"
