"""Encoding text on one thread, against Hugging Face's `tokenizers` package on the same text with the
same tokenizer.json, both cold. docs/benchmarks.md has the details.

Prints figures (lib/figure.py) on stdout. BENCH_REPEATS changes the effort; LONGHAUL_BENCH_TOKENIZER
names another program than that of build/release.
"""

import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

BENCH = Path(__file__).resolve().parent
sys.path.insert(0, str(BENCH / "lib"))

import figure  # noqa: E402
import machine  # noqa: E402

REPEATS = int(os.environ.get("BENCH_REPEATS", 3))
FAMILIES, TEXTS = ("deepseek_v3", "gpt2", "llama3", "qwen2"), ("english", "code", "cjk")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
GOAL = 1.0


def row_of(command):
    return json.loads(machine.run(command, machine.environment(ONE_THREAD)).stdout)


def compare(program, peer, name, files):
    ours, theirs = [], []
    for _ in range(REPEATS):
        ours.append(row_of([program, name, *files]))
        theirs.append(row_of([*peer, "encode", name, *files]))
        if ours[-1]["hash"] != theirs[-1]["hash"]:
            sys.exit(f"error: {name}: the two sides have different ids")
    ratios = [a["rate"] / b["rate"] for a, b in zip(ours, theirs)]
    machine.say(f"{name}: {ours[-1]['ids']} ids; the package's fastest call was {theirs[-1]['call']}")
    print(figure.line(f"tokenizer.{name}.ratio", statistics.median(ratios), "x", GOAL), flush=True)
    for side, rows in (("longhaul", ours), ("package", theirs)):
        rate = statistics.median(row["rate"] for row in rows)
        print(figure.line(f"tokenizer.{name}.{side}", rate, "MB/s"), flush=True)


def main():
    program = machine.built("bin/bench_tokenizer", "bench_tokenizer", "LONGHAUL_BENCH_TOKENIZER")
    setup = machine.run([BENCH / "peers/setup_tokenizers.sh"], machine.environment())
    peer = [setup.stdout.strip(), BENCH / "peers/tokenizer.py"]
    with tempfile.TemporaryDirectory(prefix="longhaul-bench-", dir=machine.ROOT / "build") as folder:
        machine.run([*peer, "prepare", folder], machine.environment())
        for family in FAMILIES:
            for text in TEXTS:
                files = [f"{folder}/{family}.json", f"{folder}/{text}.txt"]
                compare(program, peer, f"{family}.{text}", files)


main()
