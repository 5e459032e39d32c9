"""Saving and loading a state with its checksums, against plain writing and reading of the same bytes
in the same number of files, and against torch.distributed.checkpoint on the same tensors.
docs/benchmarks.md has the details.

Prints figures (lib/figure.py) on stdout. BENCH_REPEATS and BENCH_MEGABYTES change the effort;
LONGHAUL_BENCH_CHECKPOINT names another program than that of build/release.
"""

import os
import sys
import tempfile
from pathlib import Path

BENCH = Path(__file__).resolve().parent
sys.path.insert(0, str(BENCH / "lib"))

import figure  # noqa: E402
import machine  # noqa: E402

REPEATS = int(os.environ.get("BENCH_REPEATS", 5))
MEGABYTES = int(os.environ.get("BENCH_MEGABYTES", 1536))
GOAL_OF_PLAIN, GOAL_OF_PEER = 0.8, 1.0


def main():
    program = machine.built("bin/bench_checkpoint", "bench_checkpoint", "LONGHAUL_BENCH_CHECKPOINT")
    effort = [str(REPEATS), str(MEGABYTES)]
    with tempfile.TemporaryDirectory(prefix="longhaul-bench-", dir=machine.ROOT / "build") as folder:
        work = Path(folder)
        ours = machine.figures_of([program, work / "ours", *effort])
        script = [machine.peer_python(), "-W", "ignore", BENCH / "peers/checkpoint.py"]
        peer = machine.figures_of([*script, work / "peer", *effort])
    for name in ("save", "load"):
        rate = ours[name]["ours"]
        print(figure.line(f"checkpoint.{name}_of_plain", ours[name]["ratio"], "x", GOAL_OF_PLAIN))
        print(figure.line(f"checkpoint.{name}_of_pytorch", rate / peer[name]["rate"], "x", GOAL_OF_PEER))
        print(figure.line(f"checkpoint.{name}", rate, "GB/s"))
        print(figure.line(f"checkpoint.{name}_plain", ours[name]["plain"], "GB/s"))
        print(figure.line(f"checkpoint.{name}_pytorch", peer[name]["rate"], "GB/s"))
    print(figure.line("checkpoint.save_over_held", ours["held"]["ratio"], "x"))
    print(figure.line("checkpoint.copy", ours["held"]["ours"], "GB/s"))


main()
