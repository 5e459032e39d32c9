"""The core of sparse attention, and of the dense stages before it, on the CPU kernels: its share of
the bf16 peak that a loop on registers reaches in the same process, stage by stage, its memory, and
its speed against small operators on inputs of the same sizes: PyTorch's as usually written,
PyTorch's at their strongest (bench/peers/dsa.py), and our own reference. docs/benchmarks.md has the
details.

Prints figures (lib/figure.py) on stdout. BENCH_REPEATS changes the effort; LONGHAUL_BENCH_DSA names
another program than build/release/bin/bench_dsa.
"""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

BENCH = Path(__file__).resolve().parent
sys.path.insert(0, str(BENCH / "lib"))

import figure  # noqa: E402
import machine  # noqa: E402

REPEATS = int(os.environ.get("BENCH_REPEATS", 5))
STAGES = {
    "sparse": ("select", "attend", "backward"),
    "sparse_expanded": ("select", "attend", "backward"),
    "absorbed": ("attend", "backward", "loss"),  # dense attention in these two
    "expanded": ("attend", "backward", "loss"),
}
NOISE = 0.95  # a figure holds from this share of its goal


@dataclass(frozen=True)
class Peer:
    """PyTorch's small operators: a goal for their time over ours, and forms (arguments of
    bench/peers/dsa.py), of which the fastest counts."""

    name: str
    goal: float
    forms: tuple
    arguments: tuple  # of any form
    environment: dict


@dataclass(frozen=True)
class Shape:
    name: str
    sizes: tuple  # S H C R Hi Di K
    repeats: int
    shares: tuple  # goals in percent: the stages, then all; empty: none
    form: str = "sparse"
    peers: tuple = ()
    reference: float | None = None  # goal for our reference operators' time over ours, if they fit
    memory: float | None = None  # at most so many times the bytes of inputs and results


def usual(goal, *arguments):
    return Peer("usual", goal, (("usual",),), arguments, {})


HAS_BF16 = "avx512_bf16" in Path("/proc/cpuinfo").read_text().split()

# Which is fastest depends on the processor and the shape. Without the instruction a bf16 product of
# PyTorch's takes 2 to 13 times as long as one in fp32.
STRONGEST = tuple(
    (form, "--dtype", dtype, "--query-block", block)
    for form, block in (("masked", "256"), ("gathered", "512"))
    for dtype in (("float32", "bfloat16") if HAS_BF16 else ("float32",))
)


def strongest(goal, *arguments):
    return Peer("strongest", goal, STRONGEST, (*arguments, "--repeats", "3"), machine.HUGE_PAGES)


MINI_4K_PEERS = usual(30, "--repeats", "3"), strongest(10)
MINI_32K_PEERS = (
    usual(100, "--query-block", "512", "--sample", "2"),
    strongest(30, "--sample", "4"),
)
# Of 24 GB the gathered latents of all queries would take 10 and their gradient as much again.
REAL_PEERS = (
    usual(8, "--query-block", "256", "--sample", "2"),
    strongest(2.5, "--sample", "4"),
)

SHAPES = [
    Shape(
        "mini_4k",
        (4096, 8, 128, 32, 8, 64, 256),
        REPEATS,
        (78, 52, 52, 58),
        peers=MINI_4K_PEERS,
        reference=30,
    ),
    Shape(
        "mini_32k",
        (32768, 8, 128, 32, 8, 64, 256),
        REPEATS,
        (82, 45, 36, 62),
        peers=MINI_32K_PEERS,
        memory=1.5,
    ),
    Shape(
        "real_head_4k",
        (4096, 16, 512, 64, 64, 128, 2048),
        REPEATS,
        (91, 71, 72, 73),
        peers=REAL_PEERS,
        reference=8,
    ),
    Shape("expanded_4k", (4096, 16, 128, 64, 64, 128, 2048), 1, (), "sparse_expanded"),
    Shape("dense_mini_4k", (4096, 8, 128, 32, 8, 64, 0), REPEATS, (), "absorbed"),
    Shape("dense_real_head_4k", (4096, 16, 512, 64, 64, 128, 0), 1, (), "absorbed"),
    Shape("dense_expanded_4k", (4096, 16, 128, 64, 64, 128, 0), 1, (), "expanded"),
]


def run(what, command, environment):
    machine.say(f"{what} ({machine.memory_settings(environment)})")
    done = machine.run(command, environment)
    machine.say(f"  others took {100 * done.others:.0f}% of the CPU")
    return json.loads(done.stdout)


def measure(shape, implementation, repeats, extra=None):
    program = machine.built("bin/bench_dsa", "bench_dsa", "LONGHAUL_BENCH_DSA")
    words = [str(program), *map(str, shape.sizes), str(repeats), implementation, shape.form]
    environment = machine.environment(machine.PROCESS_POLICY | (extra or {}))
    return run(f"{shape.name}: {implementation}", words, environment)


def with_bf16_instruction(shape, fused):
    """The kernels that multiply with the processor's bf16 instruction, whose rate is the bf16 peak.
    Where fp32 ones are faster, longhaul does not choose them by itself."""
    if fused["isa"] == "avx512_bf16" or not HAS_BF16:
        return fused
    return measure(shape, "fused", shape.repeats, {"LONGHAUL_ISA": "avx512_bf16"})


def form_seconds(shape, form, arguments, environment):
    script = [machine.peer_python(), "-W", "ignore", BENCH / "peers/dsa.py"]
    words = [*script, *map(str, shape.sizes), *form, *arguments]
    what = f"{shape.name}: PyTorch, {' '.join((*form, *arguments))}"
    found = run(what, words, machine.environment(environment))["seconds"]
    machine.say(f"  {found:.2f} s")
    return found


def peer_seconds(shape, peer):
    """Of the fastest form, tried on one block of queries each."""
    form = peer.forms[0]
    if len(peer.forms) > 1:
        tried = {
            one: form_seconds(shape, one, ("--sample", "1"), peer.environment)
            for one in peer.forms
        }
        form = min(tried, key=tried.get)
    return form_seconds(shape, form, peer.arguments, peer.environment)


def seconds(result, stages):
    return sum(result[stage] for stage in stages)


def report_shares(name, shape, result):
    stages = STAGES[shape.form]
    for i, stage in enumerate(stages):
        share = 100 * result[f"{stage}_flops"] / result[stage] / result["peak_flops"]
        goal = NOISE * shape.shares[i] if shape.shares else None
        print(figure.line(f"{name}.{stage}_peak_share", share, "%", goal))
    flops = sum(result[f"{stage}_flops"] for stage in stages)
    share = 100 * flops / seconds(result, stages) / result["peak_flops"]
    goal = NOISE * shape.shares[-1] if shape.shares else None
    print(figure.line(f"{name}.peak_share", share, "%", goal))
    print(figure.line(f"{name}.peak", result["peak_flops"] / 1e9, "GFLOP/s"))


def report(shape):
    fused = measure(shape, "fused", shape.repeats)
    name, stages = f"dsa.{shape.name}", STAGES[shape.form]
    report_shares(name, shape, with_bf16_instruction(shape, fused))
    print(figure.line(f"{name}.time", 1e3 * seconds(fused, stages), "ms"))
    memory = fused["memory_bytes"] / fused["io_bytes"]
    print(figure.line(f"{name}.memory_of_inputs_and_results", memory, "x"))
    if shape.memory:
        print(figure.line(f"{name}.memory_limit_over_peak", shape.memory / memory, "x", 1.0))
    for peer in shape.peers:
        ratio = peer_seconds(shape, peer) / seconds(fused, stages)
        print(figure.line(f"{name}.ratio_{peer.name}", ratio, "x", NOISE * peer.goal))
    if shape.reference:
        reference = measure(shape, "eager", 1)
        ratio = seconds(reference, stages) / seconds(fused, stages)
        print(figure.line(f"{name}.ratio_reference", ratio, "x", NOISE * shape.reference))


if __name__ == "__main__":
    for one in SHAPES:
        report(one)
