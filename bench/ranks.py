"""Tokens a second of the 50M model as two ranks on two cores, data parallel (FSDP) and tensor
parallel, against one process with two threads: the same rows, weights and tokens a step.
docs/benchmarks.md has the details.

Prints figures (lib/figure.py) on stdout. BENCH_ROUNDS (at least 3) changes the effort;
LONGHAUL_BINARY names another program than build/release/bin/longhaul.
"""

import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

BENCH = Path(__file__).resolve().parent
sys.path.insert(0, str(BENCH / "lib"))

import figure  # noqa: E402
import machine  # noqa: E402
import training  # noqa: E402

ROUNDS = max(int(os.environ.get("BENCH_ROUNDS", 3)), 3)
RANKS = 2
LENGTH = training.Length(4096, steps=6, warm_up=2)

# A row a rank and step; a side that is one rank, or cuts no batch, takes them one after the other.
BATCH = ["--training.local_batch_size", "1", "--training.global_batch_size", str(RANKS)]

# The sides differ in the order of their sums only, in bf16.
LOSS_TOLERANCE = 2e-3


@dataclass(frozen=True)
class Layout:
    name: str
    arguments: list
    goal: float | None


LAYOUTS = [
    Layout("fsdp", ["--parallelism.data_parallel_shard_degree", str(RANKS)], 0.9),
    Layout("tp", ["--parallelism.tensor_parallel_degree", str(RANKS)], None),
]


def side(name, work, arguments=()):
    made = training.longhaul(name, BENCH / "model.toml", work, LENGTH, [*BATCH, *arguments])
    if arguments:
        threads = str(machine.THREADS // RANKS)
        made.env |= {"OMP_NUM_THREADS": threads}
    return made


def main():
    with tempfile.TemporaryDirectory(prefix="longhaul-bench-") as folder:
        work = Path(folder)
        rows = training.Length(LENGTH.seq_len, LENGTH.steps * RANKS, LENGTH.warm_up)
        training.make_inputs(machine.peer_python(), work, rows)
        alone = side("one", work)
        sides = {
            layout.name: side(layout.name, work, ["--ranks", str(RANKS), *layout.arguments])
            for layout in LAYOUTS
        }
        ratios = {layout.name: [] for layout in LAYOUTS}
        for index in range(ROUNDS):
            machine.say(f"round {index + 1}")
            for name, theirs in sides.items():
                ratios[name].append(1 / training.run_pair(alone, theirs, LOSS_TOLERANCE))
        for layout in LAYOUTS:
            ratio = median(ratios[layout.name])
            print(figure.line(f"ranks.{layout.name}_ratio", ratio, "x", layout.goal))
            speed = sides[layout.name].speed
            print(figure.line(f"ranks.{layout.name}", speed, "tokens/s"))
        print(figure.line("ranks.one_process", alone.speed, "tokens/s"))


if __name__ == "__main__":
    main()
