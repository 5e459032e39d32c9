"""Both sides of a benchmark that trains the 50M model: longhaul with a job file and the peer of
bench/peers, from the same weights and the same rows. Called by train_step.py and model.py.
"""

import json
import sys
from dataclasses import dataclass
from statistics import median

import figure
import machine

CONFIG = machine.ROOT / "longhaul/models/deepseek_v3/flavors/deepseek_v32/50M.json"

# A pair of runs that others disturbed more than this (share of the CPU) does not count: PyTorch's
# spinning threads lose up to ten times their speed on a busy machine, which would flatter longhaul.
QUIET, ATTEMPTS = 0.05, 4


@dataclass(frozen=True)
class Length:
    """One row of seq_len tokens a step; the first `warm_up` of `steps` do not count."""

    seq_len: int
    steps: int
    warm_up: int


class Side:
    """One way to train: its command, and the runs that count."""

    def __init__(self, name, command, env, warm_up, metrics=None):
        self.name, self.command, self.env, self.warm_up = name, command, env, warm_up
        self.metrics = metrics  # the file with the steps; None: they are printed
        self.runs = []
        self.log = ""  # what the last run said to people

    def run(self):
        done = machine.run(self.command, self.env)
        self.log = done.stderr
        text = self.metrics.read_text() if self.metrics else done.stdout
        steps = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        run = Run(steps, self.warm_up, done.others)
        machine.say(
            f"  {self.name:<10} {run.speed:6.0f} tokens/s, others took {run.others:.0%} of the CPU"
        )
        return run

    def median_of(self, key):
        return median(run.median_of(key) for run in self.runs)

    @property
    def speed(self):
        return self.median_of("tokens_per_second")


class Run:
    def __init__(self, steps, warm_up, others):
        self.steps, self.others = steps[warm_up:], others
        self.first_loss = steps[0]["lm_loss"]
        self.speed = self.median_of("tokens_per_second")

    def median_of(self, key):
        return median(step[key] for step in self.steps)


def longhaul(name, job, work, length, arguments=()):
    program = machine.built("bin/longhaul", "longhaul", "LONGHAUL_BINARY")
    folder = work / f"{name}_{length.seq_len}"
    command = [program, "train", job, "--training.steps", str(length.steps)]
    command += ["--training.seq_len", str(length.seq_len)]
    command += ["--training.dataset_path", rows_of(work, length) / "rows.jsonl"]
    command += ["--checkpoint.initial_load_path", rows_of(work, length)]
    command += ["--job.dump_folder", folder, *arguments]
    return Side(name, command, machine.environment(), length.warm_up, folder / "metrics.jsonl")


def peer(name, python, work, length, arguments, environment):
    script = [python, "-W", "ignore", machine.ROOT / "bench/peers/train.py"]
    script += [rows_of(work, length), "--steps", str(length.steps), *arguments]
    return Side(name, script, machine.environment(environment), length.warm_up)


def rows_of(work, length):
    return work / f"rows_{length.seq_len}"


def make_inputs(python, work, length):
    script = [python, "-W", "ignore", machine.ROOT / "bench/peers/make_inputs.py", CONFIG]
    script += [rows_of(work, length), "--rows", str(length.steps), "--seq-len", str(length.seq_len)]
    machine.run(script, machine.environment())


def run_alone(side):
    """A run that other processes left alone."""
    for _ in range(ATTEMPTS):
        run = side.run()
        if run.others <= QUIET:
            side.runs.append(run)
            return run
    fail_busy(run.others)


def run_pair(ours, theirs, loss_tolerance):
    """The ratio of two runs, one after the other, that other processes left alone."""
    for _ in range(ATTEMPTS):
        own, other = ours.run(), theirs.run()
        check_same_model(own, other, loss_tolerance)
        if max(own.others, other.others) <= QUIET:
            ours.runs.append(own)
            theirs.runs.append(other)
            return own.speed / other.speed
    fail_busy(max(own.others, other.others))


def fail_busy(others):
    sys.exit(
        f"error: other processes took {others:.0%} of the CPU, too much to measure (limit "
        f"{QUIET:.0%}); run the benchmark on an idle machine"
    )


def check_same_model(ours, theirs, tolerance):
    if not abs(ours.first_loss - theirs.first_loss) <= tolerance:
        sys.exit(
            f"error: the sides do not compute the same: the first loss is {ours.first_loss:.5f} in "
            f"longhaul and {theirs.first_loss:.5f} in the peer; run bench/peers/check_golden.py"
        )


def report_speeds(name, ours, sides, least_shares=None):
    """Each side's speed, and as a share of the large product's that longhaul measures. A peer that
    has a least share falls short below it: a weaker one proves nothing."""
    goals = {f"peer_{peer}": share for peer, share in (least_shares or {}).items()}
    for side_name, side in {"longhaul": ours, **{f"peer_{k}": v for k, v in sides.items()}}.items():
        share = 100 * ours.median_of("mfu") * side.speed / ours.speed
        print(figure.line(f"{name}.{side_name}", side.speed, "tokens/s"))
        print(figure.line(f"{name}.{side_name}_peak_share", share, "%", goals.get(side_name)))


@dataclass(frozen=True)
class Profile:
    table: str  # of the time by operator
    host_share: float  # of a step, in percent


def profile_in(log):
    """What longhaul says after the steps that it recorded (longhaul/train/profiler.h)."""
    lines = log.splitlines()
    heads = [i for i, line in enumerate(lines) if line.split()[:2] == ["operator", "calls"]]
    ends = [i for i, line in enumerate(lines) if line.startswith("  host, forward and backward")]
    if not heads or not ends or ends[-1] < heads[-1]:
        sys.exit("error: longhaul printed no table of the time by operator")
    host_share = float(lines[ends[-1]].split()[-1].removesuffix("%"))
    return Profile("\n".join(lines[heads[-1] : ends[-1] + 1]), host_share)
