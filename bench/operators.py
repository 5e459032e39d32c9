"""The operators around attention on the CPU kernels: what moves memory against the bandwidth that
PyTorch's own copies reach in the same process, and grouped products against one oneDNN product of
the same FLOPs. docs/benchmarks.md has the details.

Prints figures (lib/figure.py) on stdout. BENCH_REPEATS changes the effort; LONGHAUL_OPS_LIBRARY
names another library than build/release/longhaul/ops/liblonghaul_ops.so.
"""

import json
import os
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parent
sys.path.insert(0, str(BENCH / "lib"))

import figure  # noqa: E402
import machine  # noqa: E402

LIBRARY = BENCH.parent / "build/release/longhaul/ops/liblonghaul_ops.so"
REPEATS = int(os.environ.get("BENCH_REPEATS", 5))
NOISE = 0.95  # a figure holds from this share of its goal
GOALS = {"bandwidth_share": 70.0, "product_share": 85.0}


def main():
    library = Path(os.environ.get("LONGHAUL_OPS_LIBRARY", LIBRARY))
    if not library.exists():
        sys.exit(
            f"error: no {library}; build it: cmake --build --preset release --target "
            "longhaul_ops_library"
        )
    python = machine.run([BENCH / "peers/setup.sh"], machine.environment(2)).stdout.strip()
    environment = machine.environment(2, machine.PROCESS_POLICY | {"BENCH_REPEATS": str(REPEATS)})
    command = [python, "-W", "ignore", BENCH / "peers/operators.py", library]
    done = machine.run(command, environment)
    machine.say(f"others took {done.others:.0%} of the CPU")
    for text in done.stdout.splitlines():
        measured = json.loads(text)
        goal = GOALS.get(measured["kind"])
        print(
            figure.line(
                f"operators.{measured['name']}",
                measured["value"],
                measured["unit"],
                goal and NOISE * goal,
            )
        )


if __name__ == "__main__":
    main()
