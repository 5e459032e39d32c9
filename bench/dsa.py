"""The core of sparse attention, and of the dense stages before it, on the CPU kernels: its share of the
bf16 peak that a loop on registers reaches in the same process, stage by stage, its memory, and its
speed against the eager reference operators on the same inputs. docs/benchmarks.md has the details.

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
    "absorbed": ("attend", "backward", "loss"),  # dense attention in these two
    "expanded": ("attend", "backward", "loss"),
}
NOISE = 0.95  # a figure holds from this share of its goal


@dataclass(frozen=True)
class Shape:
    name: str
    sizes: tuple  # S H C R Hi Di K
    repeats: int
    shares: tuple  # goals in percent: the stages, then all; empty: none
    eager_ratio: float | None  # goal; None: the eager operators do not fit
    form: str = "sparse"


SHAPES = [
    Shape("mini_4k", (4096, 8, 128, 32, 8, 64, 256), REPEATS, (78, 52, 52, 58), 30),
    Shape("mini_32k", (32768, 8, 128, 32, 8, 64, 256), REPEATS, (82, 45, 36, 62), None),
    Shape("real_head_4k", (4096, 16, 512, 64, 64, 128, 2048), min(REPEATS, 3), (91, 71, 72, 73), 8),
    Shape("dense_mini_4k", (4096, 8, 128, 32, 8, 64, 0), REPEATS, (), None, "absorbed"),
    Shape("dense_real_head_4k", (4096, 16, 512, 64, 64, 128, 0), 1, (), None, "absorbed"),
    Shape("dense_expanded_4k", (4096, 16, 128, 64, 64, 128, 0), 1, (), None, "expanded"),
]


def measure(shape, implementation, repeats):
    program = os.environ.get("LONGHAUL_BENCH_DSA", BENCH.parent / "build/release/bin/bench_dsa")
    if not Path(program).exists():
        sys.exit(f"error: no {program}; build it: cmake --build --preset release --target bench_dsa")
    words = [str(program), *map(str, shape.sizes), str(repeats), implementation, shape.form]
    environment = machine.environment(threads=2, extra=machine.PROCESS_POLICY)
    machine.say(f"{shape.name}: {implementation}")
    done = machine.run(words, environment)
    machine.say(f"  others took {100 * done.others:.0f}% of the CPU")
    return json.loads(done.stdout)


def seconds(result, stages):
    return sum(result[stage] for stage in stages)


def report(shape):
    fused = measure(shape, "fused", shape.repeats)
    name, stages = f"dsa.{shape.name}", STAGES[shape.form]
    for i, stage in enumerate(stages):
        share = 100 * fused[f"{stage}_flops"] / fused[stage] / fused["peak_flops"]
        goal = NOISE * shape.shares[i] if shape.shares else None
        print(figure.line(f"{name}.{stage}_peak_share", share, "%", goal))
    flops = sum(fused[f"{stage}_flops"] for stage in stages)
    share = 100 * flops / seconds(fused, stages) / fused["peak_flops"]
    goal = NOISE * shape.shares[-1] if shape.shares else None
    print(figure.line(f"{name}.peak_share", share, "%", goal))
    print(figure.line(f"{name}.peak", fused["peak_flops"] / 1e9, "GFLOP/s"))
    print(figure.line(f"{name}.time", 1e3 * seconds(fused, stages), "ms"))
    memory = fused["memory_bytes"] / fused["io_bytes"]
    print(figure.line(f"{name}.memory_of_inputs_and_results", memory, "x"))
    if shape.eager_ratio:
        eager = measure(shape, "eager", 1)
        ratio = seconds(eager, stages) / seconds(fused, stages)
        print(figure.line(f"{name}.ratio_eager", ratio, "x", NOISE * shape.eager_ratio))


if __name__ == "__main__":
    for one in SHAPES:
        report(one)
