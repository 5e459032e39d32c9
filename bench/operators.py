"""The operators around attention on the CPU kernels: what moves memory against the bandwidth that
PyTorch's own copies reach in the same process, grouped products against one product of the same
FLOPs, and the fused kernels against our own reference operators. docs/benchmarks.md has the
details.

Prints figures (lib/figure.py) on stdout. BENCH_REPEATS changes the effort; LONGHAUL_OPS_LIBRARY and
LONGHAUL_BENCH_OPERATORS name another library and program than those of build/release.
"""

import os
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parent
sys.path.insert(0, str(BENCH / "lib"))

import figure  # noqa: E402
import machine  # noqa: E402

REPEATS = int(os.environ.get("BENCH_REPEATS", 5))
NOISE = 0.95  # a figure holds from this share of its goal
GOALS = {"bandwidth_share": 70.0, "product_share": 85.0}

# Published for the same operators on an accelerator, small ones over fused; to be beaten.
REFERENCE_GOALS = {
    "rms_norm.forward": 3.5,
    "permute.forward": 6.3,
    "grouped_matmul.forward": 1.29,
}


# PyTorch takes aligned blocks. What glibc cuts off in front of them it keeps in lists of small
# blocks, so that a freed block is too small for the next tensor of its size, which then lies in new
# pages that the kernel clears. Without these lists freed blocks grow together again. (longhaul's
# own process takes no aligned blocks.)
JOINED_BLOCKS = machine.PROCESS_POLICY | {
    "GLIBC_TUNABLES": machine.PROCESS_POLICY["GLIBC_TUNABLES"]
    + ":glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0"
}


def compare_with_pytorch():
    library = machine.built(
        "longhaul/ops/liblonghaul_ops.so", "longhaul_ops_library", "LONGHAUL_OPS_LIBRARY"
    )
    python = machine.peer_python()
    environment = machine.environment(JOINED_BLOCKS | {"BENCH_REPEATS": str(REPEATS)})
    command = [python, "-W", "ignore", BENCH / "peers/operators.py", library]
    for measured in machine.rows_of(command, environment):
        goal = GOALS.get(measured["kind"])
        print(
            figure.line(
                f"operators.{measured['name']}",
                measured["value"],
                measured["unit"],
                goal and NOISE * goal,
            )
        )


def compare_with_reference():
    program = machine.built("bin/bench_operators", "bench_operators", "LONGHAUL_BENCH_OPERATORS")
    environment = machine.environment(machine.PROCESS_POLICY)
    for measured in machine.rows_of([program, str(REPEATS)], environment):
        name, ratio = measured["name"], measured["reference"] / measured["fused"]
        goal = REFERENCE_GOALS.get(name)
        print(figure.line(f"operators.{name}.ratio_reference", ratio, "x", goal))


if __name__ == "__main__":
    machine.say(f"beside PyTorch: {machine.memory_settings(JOINED_BLOCKS)}")
    compare_with_pytorch()
    machine.say(f"beside the reference: {machine.memory_settings(machine.PROCESS_POLICY)}")
    compare_with_reference()
