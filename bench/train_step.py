"""Tokens a second of one training step: longhaul's plain path against the same model in eager
PyTorch, from the same weights and the same data, in one run. docs/benchmarks.md has the details.

Prints figures (lib/figure.py) on stdout. BENCH_ROUNDS (at least 3) and BENCH_STEPS change the
effort; LONGHAUL_BINARY names another program than build/release/bin/longhaul.
"""

import json
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

CONFIG = BENCH.parent / "longhaul/models/deepseek_v3/flavors/deepseek_v32/50M.json"
SEQ_LEN, THREADS, WARM_UP = 1024, 2, 3
STEPS = max(int(os.environ.get("BENCH_STEPS", 10)), WARM_UP + 3)
ROUNDS = max(int(os.environ.get("BENCH_ROUNDS", 3)), 3)

# The first loss may differ by this much: torch.topk breaks exact ties of indexer scores in another
# order than longhaul, which moves a few keys in a few rows.
LOSS_TOLERANCE = 5e-3

# A pair of runs that others disturbed more than this (share of the CPU) does not count: PyTorch's
# spinning threads lose up to ten times their speed on a busy machine, which would flatter longhaul.
QUIET, ATTEMPTS = 0.05, 4


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


def longhaul_binary():
    path = Path(os.environ.get("LONGHAUL_BINARY", BENCH.parent / "build/release/bin/longhaul"))
    if not path.exists():
        sys.exit(f"error: no {path}; build it: cmake --build --preset release --target longhaul")
    return path


def peer_python():
    setup = machine.run([BENCH / "peers/setup.sh"], machine.environment(THREADS))
    return setup.stdout.strip()


class Side:
    """One way to train: its command, and the runs that count."""

    def __init__(self, name, command, env, metrics=None):
        self.name, self.command, self.env = name, command, env
        self.metrics = metrics  # the file with the steps; None: they are printed
        self.runs = []

    def run(self):
        done = machine.run(self.command, self.env)
        text = self.metrics.read_text() if self.metrics else done.stdout
        steps = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        run = Run(steps, done.others)
        machine.say(
            f"  {self.name:<10} {run.speed:6.0f} tokens/s, others took {run.others:.0%} of the CPU"
        )
        return run

    @property
    def speed(self):
        return median(run.speed for run in self.runs)


class Run:
    def __init__(self, steps, others):
        self.steps, self.others = steps[WARM_UP:], others
        self.first_loss = steps[0]["lm_loss"]
        self.speed = self.median_of("tokens_per_second")

    def median_of(self, key):
        return median(step[key] for step in self.steps)


def longhaul_side(work):
    job = [BENCH / "train_step.toml", "--training.steps", str(STEPS)]
    job += ["--training.dataset_path", work / "rows.jsonl"]
    job += ["--checkpoint.initial_load_path", work, "--job.dump_folder", work / "run"]
    command = [longhaul_binary(), "train", *job]
    return Side("longhaul", command, machine.environment(THREADS), work / "run/metrics.jsonl")


def peer_side(peer, python, work):
    script = [python, "-W", "ignore", BENCH / "peers/train.py", work, "--steps", str(STEPS)]
    env = machine.environment(THREADS, peer.environment)
    return Side(peer.name, [*script, *peer.arguments], env)


def make_inputs(python, work):
    script = [python, "-W", "ignore", BENCH / "peers/make_inputs.py", CONFIG, work]
    machine.run(
        [*script, "--rows", str(STEPS), "--seq-len", str(SEQ_LEN)], machine.environment(THREADS)
    )


def run_pair(ours, theirs):
    """The ratio of two runs, one after the other, that other processes left alone."""
    for _ in range(ATTEMPTS):
        own, other = ours.run(), theirs.run()
        check_same_model(own, other)
        if max(own.others, other.others) <= QUIET:
            ours.runs.append(own)
            theirs.runs.append(other)
            return own.speed / other.speed
    sys.exit(
        f"error: other processes took {max(own.others, other.others):.0%} of the CPU, too much to "
        f"measure (limit {QUIET:.0%}); run the benchmark on an idle machine"
    )


def check_same_model(ours, theirs):
    if not abs(ours.first_loss - theirs.first_loss) <= LOSS_TOLERANCE:
        sys.exit(
            f"error: the sides do not compute the same: the first loss is {ours.first_loss:.5f} in "
            f"longhaul and {theirs.first_loss:.5f} in the peer; run bench/peers/check_golden.py"
        )


def describe():
    def settings(variables):
        return " ".join(f"{key}={value}" for key, value in variables.items())

    load = os.getloadavg()[0]
    machine.say(f"{ROUNDS} rounds of {STEPS} steps, {THREADS} threads, load average {load:.2f}")
    own = settings(machine.PROCESS_POLICY)
    machine.say(f"  longhaul, by itself: {own}")
    for peer in PEERS:
        allocator = settings(peer.environment) or "allocator as it comes"
        machine.say(f"  {peer.name}: {' '.join([allocator, *peer.arguments])}")


def measure(ours, sides):
    """The ratio to each peer. With a goal: from neighbouring runs, so that a drift of the machine
    meets both sides. Without one the peer runs in one round only, against the median of ours."""
    ratios = {peer.name: [] for peer in PEERS}
    for index in range(ROUNDS):
        machine.say(f"round {index + 1}")
        for peer in PEERS:
            if peer.goal is None and index > 0:
                continue
            ratios[peer.name].append(run_pair(ours, sides[peer.name]))
    return {
        peer.name: median(ratios[peer.name]) if peer.goal else ours.speed / sides[peer.name].speed
        for peer in PEERS
    }


def report(ours, sides, ratios):
    peak_share = median(run.median_of("mfu") for run in ours.runs)
    for peer in PEERS:
        print(figure.line(f"train_step.ratio_{peer.name}", ratios[peer.name], "x", peer.goal))
    for name, side in {"longhaul": ours, **{f"peer_{k}": v for k, v in sides.items()}}.items():
        share = 100 * peak_share * side.speed / ours.speed
        print(figure.line(f"train_step.{name}", side.speed, "tokens/s"))
        print(figure.line(f"train_step.{name}_peak_share", share, "%"))


def main():
    python = peer_python()
    with tempfile.TemporaryDirectory(prefix="longhaul-bench-") as folder:
        work = Path(folder)
        ours = longhaul_side(work)
        sides = {peer.name: peer_side(peer, python, work) for peer in PEERS}
        make_inputs(python, work)
        describe()
        report(ours, sides, measure(ours, sides))


if __name__ == "__main__":
    main()
