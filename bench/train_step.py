"""Tokens a second of one training step: longhaul's plain path against the same model in eager
PyTorch, from the same weights and the same data, in one run. docs/benchmarks.md has the details.

Prints figures (lib/figure.py) on stdout. BENCH_ROUNDS (at least 3) and BENCH_STEPS change the
effort; LONGHAUL_BINARY names another program than build/release/bin/longhaul.
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

SEQ_LEN, WARM_UP = 1024, 3
STEPS = max(int(os.environ.get("BENCH_STEPS", 10)), WARM_UP + 3)
ROUNDS = max(int(os.environ.get("BENCH_ROUNDS", 3)), 3)

# The first loss may differ by this much: torch.topk breaks exact ties of indexer scores in another
# order than longhaul, which moves a few keys in a few rows.
LOSS_TOLERANCE = 5e-3

@dataclass(frozen=True)
class Peer:
    name: str
    environment: dict
    arguments: list
    goal: float | None


PEERS = [
    Peer("default", {}, [], 1.3),
    Peer("tuned", machine.TUNED_ALLOCATOR, [], 1.0),
    # Beyond "the same model in eager PyTorch": what an expert could still get out of it.
    Peer("huge_pages", machine.HUGE_PAGES, [], None),
    Peer("blocked", machine.HUGE_PAGES, ["--query-block", "256"], None),
    Peer("onednn", machine.HUGE_PAGES, ["--onednn"], None),
]


def describe():
    load = os.getloadavg()[0]
    threads = machine.THREADS
    machine.say(f"{ROUNDS} rounds of {STEPS} steps, {threads} threads, load average {load:.2f}")
    machine.say(f"  longhaul, by itself: {machine.memory_settings(machine.PROCESS_POLICY)}")
    for peer in PEERS:
        settings = machine.memory_settings(peer.environment)
        machine.say(f"  {peer.name}: {' '.join([settings, *peer.arguments])}")


def measure(ours, sides):
    """The ratio to each peer. With a goal: from neighbouring runs, so that a drift of the machine
    meets both sides. Without one the peer runs in one round only, against the median of ours."""
    ratios = {peer.name: [] for peer in PEERS}
    for index in range(ROUNDS):
        machine.say(f"round {index + 1}")
        for peer in PEERS:
            if peer.goal is None and index > 0:
                continue
            ratios[peer.name].append(training.run_pair(ours, sides[peer.name], LOSS_TOLERANCE))
    return {
        peer.name: median(ratios[peer.name]) if peer.goal else ours.speed / sides[peer.name].speed
        for peer in PEERS
    }


def report(ours, sides, ratios):
    for peer in PEERS:
        print(figure.line(f"train_step.ratio_{peer.name}", ratios[peer.name], "x", peer.goal))
    training.report_speeds("train_step", ours, sides)


def main():
    python = machine.peer_python()
    with tempfile.TemporaryDirectory(prefix="longhaul-bench-") as folder:
        work = Path(folder)
        length = training.Length(SEQ_LEN, STEPS, WARM_UP)
        ours = training.longhaul("longhaul", BENCH / "train_step.toml", work, length)
        sides = {
            peer.name: training.peer(
                peer.name, python, work, length, peer.arguments, peer.environment
            )
            for peer in PEERS
        }
        training.make_inputs(python, work, length)
        describe()
        report(ours, sides, measure(ours, sides))


if __name__ == "__main__":
    main()
