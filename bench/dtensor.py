"""What a DTensor costs: one `add` and one `mm` of 8 x 8 through a DTensor whose sharding decision
is cached, beside the plain call and beside PyTorch's own DTensor. docs/benchmarks.md has the
details.

Prints figures (lib/figure.py) on stdout. BENCH_REPEATS changes the effort; LONGHAUL_BENCH_DTENSOR
names another program than that of build/release.
"""

import os
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parent
sys.path.insert(0, str(BENCH / "lib"))

import figure  # noqa: E402
import machine  # noqa: E402

REPEATS = int(os.environ.get("BENCH_REPEATS", 5))
MOST_ADDED_US = 1.0


def main():
    program = machine.built("bin/bench_dtensor", "bench_dtensor", "LONGHAUL_BENCH_DTENSOR")
    ours = machine.figures_of([program, str(REPEATS)])
    peer = machine.figures_of([machine.peer_python(), "-W", "ignore", BENCH / "peers/dtensor.py", str(REPEATS)])
    for name, row in ours.items():
        added = row["dtensor"] - row["plain"]
        # A figure holds from its goal up, so what must be small is turned round.
        print(figure.line(f"dtensor.{name}.budget_over_added", MOST_ADDED_US / added, "x", 1.0))
        print(figure.line(f"dtensor.{name}.added", added, "us"))
        print(figure.line(f"dtensor.{name}.plain", row["plain"], "us"))
        print(figure.line(f"dtensor.{name}.pytorch", peer[name]["dtensor"], "us"))
        print(figure.line(f"dtensor.{name}.pytorch_plain", peer[name]["plain"], "us"))


main()
