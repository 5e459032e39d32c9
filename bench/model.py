"""The whole 50M model: tokens a second and memory of longhaul with all converters in bf16, against
the same model in PyTorch as it comes (eager) and as far as we could tune it (compiled), at two
lengths; where the time of a step goes; then a length that the peers cannot run. docs/benchmarks.md
has the details.

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
JOB = BENCH / "model.toml"

# One side computes in bf16, the other in fp32 or with rounded latents: the first losses, of random
# weights on random ids, may differ by 0.2%.
LOSS_TOLERANCE = 2e-3 * 9.01

# What longhaul may take, in bytes, and how much slower than at 4,096 tokens it may be.
MEMORY_4K, MEMORY_32K, SPEED_32K = 3e9, 8e9, 0.5

LONG = training.Length(32768, steps=3, warm_up=1)
CHECKPOINTED = ["--activation_checkpoint.mode", "full"]

# All converters, but fp32: on a CPU without fast bf16 products the better choice.
IN_FP32 = ["--training.mixed_precision_param", "float32"]

# The small operators of longhaul's own reference path (the published step went from small operators
# to fused ones at this length, too).
REFERENCE = ["--model.converters", "[]"]
REFERENCE_GOAL = 2.58

# One step of a run is recorded, its last: the profiler adds to what it measures.
PROFILED = ["--profiling.enable_profiling", "--profiling.profile_freq"]

# The compiled peer was quoted with other tokens/s, from a machine that nobody named; we take it to
# be two cores of an AMD EPYC Zen 5 (docs/benchmarks.md says why), with the least that a large bf16
# product was seen to reach there.
QUOTED_PEAK = 830e9  # FLOP/s


def quoted_share(tokens_per_second, flops_per_token):
    """Percent of the quoted machine's peak, with the FLOPs that mfu counts for this job."""
    return round(100 * tokens_per_second * flops_per_token / QUOTED_PEAK, 1)


@dataclass(frozen=True)
class Peer:
    name: str
    goal: float
    arguments: list
    environment: dict
    steps: int
    warm_up: int
    rounds: int = ROUNDS
    least_share: float | None = None  # percent of the peak below which the peer does not count


@dataclass(frozen=True)
class Case:
    length: training.Length
    peers: list


@dataclass(frozen=True)
class Tuning:
    """What of the compiled peer's setting depends on the processor."""

    arguments: tuple = ()
    environment: tuple = ()

    def compiled(self, query_block, goal, steps, warm_up, least_share):
        arguments = ["--compile", "--query-block", str(query_block), *self.arguments]
        environment = machine.HUGE_PAGES | dict(self.environment)
        return Peer("compiled", goal, arguments, environment, steps, warm_up, ROUNDS, least_share)


PASSIVE = (("OMP_WAIT_POLICY", "passive"),)
TUNINGS = [
    Tuning(products, waiting) for products in ((), ("--onednn",)) for waiting in ((), PASSIVE)
]
TRIED = training.Length(1024, steps=7, warm_up=3)


def cases(tuning):
    short, long = training.Length(1024, steps=10, warm_up=3), training.Length(4096, 5, 2)
    return [
        Case(
            short,
            [
                Peer("eager", 5.0, [], {}, 8, 2),
                tuning.compiled(256, 2.5, 10, 3, quoted_share(904, 156.1e6)),
            ],
        ),
        Case(
            long,
            [
                Peer("eager", 20.0, [], {}, 2, 1, rounds=1),  # minutes a step
                tuning.compiled(512, 4.0, 5, 2, quoted_share(534, 167.9e6)),
            ],
        ),
    ]


def fastest_tuning(work, python):
    training.make_inputs(python, work, TRIED)

    def speed(tuning):
        peer = tuning.compiled(256, None, TRIED.steps, TRIED.warm_up, None)
        name = " ".join((*tuning.arguments, *(value for _, value in tuning.environment))) or "as is"
        side = training.peer(name, python, work, TRIED, peer.arguments, peer.environment)
        return training.run_alone(side).speed

    machine.say(f"the compiled peer's setting at {TRIED.seq_len} tokens")
    return max(TUNINGS, key=speed)


def measure(case, work, python):
    """The medians of the rounds' ratios by peer, and both sides' runs."""
    training.make_inputs(python, work, case.length)
    ours = training.longhaul("longhaul", JOB, work, case.length)
    sides = {
        peer.name: training.peer(
            peer.name,
            python,
            work,
            training.Length(case.length.seq_len, peer.steps, peer.warm_up),
            peer.arguments,
            peer.environment,
        )
        for peer in case.peers
    }
    machine.say(f"longhaul: {machine.memory_settings(machine.PROCESS_POLICY)}")
    for peer in case.peers:
        machine.say(f"{peer.name}: {machine.memory_settings(peer.environment)}")
    ratios = {peer.name: [] for peer in case.peers}
    for index in range(ROUNDS):
        machine.say(f"{case.length.seq_len} tokens, round {index + 1}")
        for peer in case.peers:
            if index >= peer.rounds:
                continue
            ratio = training.run_pair(ours, sides[peer.name], LOSS_TOLERANCE)
            ratios[peer.name].append(ratio)
    return ours, sides, {name: median(values) for name, values in ratios.items()}


def report(case, ours, sides, ratios):
    name = f"model.{case.length.seq_len}"
    for peer in case.peers:
        print(figure.line(f"{name}.ratio_{peer.name}", ratios[peer.name], "x", peer.goal))
    least_shares = {peer.name: peer.least_share for peer in case.peers}
    training.report_speeds(name, ours, sides, least_shares)


def report_memory(name, side, limit):
    """The limit over the peak: at least 1."""
    peak = side.median_of("memory_peak_bytes")
    print(figure.line(f"{name}.memory_peak", peak / 1e9, "GB"))
    print(figure.line(f"{name}.memory_limit_over_peak", limit / peak, "x", 1.0))


def run_in_fp32(work, length):
    side = training.longhaul("longhaul_fp32", JOB, work, length, IN_FP32)
    training.run_alone(side)
    print(figure.line(f"model.{length.seq_len}.longhaul_fp32", side.speed, "tokens/s"))


def compare_with_reference(ours, length, work):
    """longhaul without converters, the same job otherwise."""
    reference = training.longhaul("reference", JOB, work, length, REFERENCE)
    ratios = [training.run_pair(ours, reference, LOSS_TOLERANCE) for _ in range(ROUNDS)]
    name = f"model.{length.seq_len}.ratio_reference"
    print(figure.line(name, median(ratios), "x", REFERENCE_GOAL))


def run_profiled(work, length):
    """Where the time of a step goes, by operator."""
    arguments = [*PROFILED, str(length.steps)]
    side = training.longhaul("longhaul_profiled", JOB, work, length, arguments)
    training.run_alone(side)
    profile = training.profile_in(side.log)
    machine.say(profile.table)
    print(figure.line(f"model.{length.seq_len}.host_share", profile.host_share, "%"))


def run_long(ours_4k, work, python):
    training.make_inputs(python, work, LONG)
    side = training.longhaul("longhaul", JOB, work, LONG, CHECKPOINTED)
    training.run_alone(side)
    name = f"model.{LONG.seq_len}"
    print(figure.line(f"{name}.longhaul", side.speed, "tokens/s"))
    print(figure.line(f"{name}.speed_of_4096", side.speed / ours_4k.speed, "x", SPEED_32K))
    report_memory(name, side, MEMORY_32K)


def main():
    python = machine.peer_python()
    with tempfile.TemporaryDirectory(prefix="longhaul-bench-") as folder:
        work = Path(folder)
        for case in cases(fastest_tuning(work, python)):
            ours, sides, ratios = measure(case, work, python)
            report(case, ours, sides, ratios)
            run_in_fp32(work, case.length)
        # The last case is that of 4,096 tokens.
        report_memory(f"model.{case.length.seq_len}", ours, MEMORY_4K)
        compare_with_reference(ours, case.length, work)
        run_profiled(work, case.length)
        run_long(ours, work, python)


if __name__ == "__main__":
    main()
