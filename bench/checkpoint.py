"""Saving, loading and resuming a state with its checksums, against plain writing and reading of the
same bytes in the same number of files, and against torch.distributed.checkpoint on the same tensors; and for
how long training waits for a save in the background. docs/benchmarks.md has the details.

Prints figures (lib/figure.py) on stdout. BENCH_REPEATS and BENCH_MEGABYTES change the effort;
LONGHAUL_BENCH_CHECKPOINT and LONGHAUL_BINARY name other programs than those of build/release.
"""

import json
import os
import random
import sys
import tempfile
from pathlib import Path
from statistics import median

BENCH = Path(__file__).resolve().parent
sys.path.insert(0, str(BENCH / "lib"))

import figure  # noqa: E402
import machine  # noqa: E402

REPEATS = int(os.environ.get("BENCH_REPEATS", 5))
MEGABYTES = int(os.environ.get("BENCH_MEGABYTES", 1536))
GOAL_OF_PLAIN, GOAL_OF_PEER = 0.8, 1.0
SEQ_LEN, STEPS, INTERVAL = 1024, 16, 4


def train(work):
    """The lines of metrics.jsonl of steps of the 50M model, every INTERVAL-th of which is saved in
    the background."""
    program = machine.built("bin/longhaul", "longhaul", "LONGHAUL_BINARY")
    rows, draw = work / "rows.jsonl", random.Random(1)
    rows.write_text(
        "".join(
            json.dumps({"input_ids": [draw.randrange(8192) for _ in range(SEQ_LEN)]}) + "\n"
            for _ in range(STEPS)
        )
    )
    command = [program, "train", BENCH / "train_step.toml", "--training.steps", str(STEPS)]
    command += ["--training.dataset_path", rows, "--job.dump_folder", work / "run"]
    command += ["--checkpoint.no_load_only", "--checkpoint.no_initial_load_in_hf"]
    command += ["--checkpoint.interval", str(INTERVAL), "--checkpoint.async_mode", "async"]
    machine.run(command, machine.environment())
    return [json.loads(line) for line in (work / "run/metrics.jsonl").read_text().splitlines()]


def report_held(steps):
    """How long training waits for a save, as a share of a step: the time between two steps, less
    what it is where nothing is saved."""
    seconds = {step["step"]: SEQ_LEN / step["tokens_per_second"] for step in steps}
    between = {
        after["step"] - 1: after["time"] - before["time"] - seconds[after["step"]]
        for before, after in zip(steps, steps[1:])
    }
    saved = [gap for step, gap in between.items() if step % INTERVAL == 0]
    others = [gap for step, gap in between.items() if step % INTERVAL != 0]
    # While a save is under way, its thread takes its share of the cores.
    beside = [time for step, time in seconds.items() if step > 1 and step % INTERVAL == 1]
    alone = [time for step, time in seconds.items() if step > 1 and step % INTERVAL == 0]
    held = median(saved) - median(others)
    print(figure.line("checkpoint.held_share_of_step", held / median(alone), "x"))
    print(figure.line("checkpoint.step_beside_save", median(beside) / median(alone), "x"))


def in_turns(work):
    """Rounds of ours and of the peer's, one of each after the other: what else the machine does
    then meets both. Lists of figures by name, a round each."""
    program = machine.built("bin/bench_checkpoint", "bench_checkpoint", "LONGHAUL_BENCH_CHECKPOINT")
    peer = [machine.peer_python(), "-W", "ignore", BENCH / "peers/checkpoint.py"]
    sides = [program], peer
    rounds = [], []
    for _ in range(REPEATS):
        for side, figures in zip(sides, rounds):
            with tempfile.TemporaryDirectory(dir=work) as folder:
                figures.append(machine.figures_of([*side, folder, "1", str(MEGABYTES)]))
    return rounds


def report(ours, peers):
    def middle(rounds, name, key):
        return median(figures[name][key] for figures in rounds)

    # Resuming: checksums first, and then the values, as a run that starts does it.
    for name, theirs in (("save", "save"), ("load", "load"), ("resume", "load")):
        of_peer = median(a[name]["ours"] / b[theirs]["rate"] for a, b in zip(ours, peers))
        of_plain = middle(ours, name, "ratio")
        print(figure.line(f"checkpoint.{name}_of_plain", of_plain, "x", GOAL_OF_PLAIN))
        print(figure.line(f"checkpoint.{name}_of_pytorch", of_peer, "x", GOAL_OF_PEER))
        print(figure.line(f"checkpoint.{name}", middle(ours, name, "ours"), "GB/s"))
    for name in ("save", "load"):
        print(figure.line(f"checkpoint.{name}_plain", middle(ours, name, "plain"), "GB/s"))
        print(figure.line(f"checkpoint.{name}_pytorch", middle(peers, name, "rate"), "GB/s"))
    print(figure.line("checkpoint.save_over_held", middle(ours, "held", "ratio"), "x"))
    print(figure.line("checkpoint.copy", middle(ours, "held", "ours"), "GB/s"))


def main():
    with tempfile.TemporaryDirectory(prefix="longhaul-bench-", dir=machine.ROOT / "build") as folder:
        work = Path(folder)
        ours, peers = in_turns(work)
        steps = train(work)
    report(ours, peers)
    report_held(steps)


main()
